"""verify_cap (DSV41_VERIFY_CAP): verify fewer drafts of a request where the draft is unsure, in the fixed-shape verify.

Every request keeps its `stride` verify rows, so the captured graphs keep their shape. Of them, rows 0..L are live. Dead
rows take their anchor row's experts, so that they stream no expert weights of their own, and at most L drafts are
accepted. L is fixed (`1`..`5`), or follows from the draft's confidence head (`conf:t`, `conf:a,b,c,d`): L grows from 1
while the confidence of the next draft is at least its threshold. The confidence of draft j follows from x_1..x_{j-1},
so [L >= j] is a function of earlier drafts alone: the causal rule, for which every form of the cap is exact (tests
enumerate it). The engine skips the confidence head in static mode; it is built here.

The live rows are an int32 buffer that the draft writes every step, in its graph's tail or eagerly, and rank 0
broadcasts at the engine's own DSPARK_PLAN site: the ranks must route alike.

Guarantee: exact in distribution; greedy text identical. Live rows may differ in their last bits from an uncapped
verify, as with another batch composition, where the experts' kernels depend on how many rows an expert has.
"""

from __future__ import annotations

import json
from typing import Any

from ._speculative_live import LIVE, LiveCutoff
from ._speculative_modes import WORKER, hosts_draft, note, read_facts
from .base import Adapter, AdapterState, Guarantee, Patch, Target

__all__ = ["VerifyCap"]

_ROOM = "sglang.srt.speculative.dspark_components."
_DRAFT, _SAMPLER, _VERIFY, _PLANNER, _OBSERVERS = (
    _ROOM + name
    for name in ("dspark_draft", "dspark_draft_sampler", "dspark_verify", "dspark_planner", "dspark_observability")
)
_DRAFT_MODEL, _MODEL = "sglang.srt.models.deepseek_v4_dspark", "sglang.srt.models.deepseek_v4"
_GATE, _HASH = "sglang.kernels.ops.moe.moe_fused_gate", "sglang.srt.layers.moe.hash_topk"
_ACCEPT = "sglang.kernels.ops.speculative.dspark.dspark_accept"
_OLD, _SINCE_23 = ("0.5.21",), ("0.5.23",)


class VerifyCap(Adapter):
    name = "verify_cap"
    summary = "Verify only as many drafts of a request as its draft is confident of, in the fixed-shape verify."
    guarantee = Guarantee.EXACT_IN_DISTRIBUTION
    docs = "docs/speculative.md"
    targets = (
        Target(_DRAFT_MODEL, "build_dspark_v4_confidence_head"),
        Target(_DRAFT_MODEL, "DeepseekV4ForCausalLMDSpark.compute_confidence"),
        # Every step computes the confidence once, in the draft graph's tail or eagerly.
        Target(_SAMPLER, "DsparkDraftSampler.__call__", patched=False),
        Target(_DRAFT, "DraftBlockProposer.propose", patched=False),
        Target(_PLANNER, "DSparkVerifyPlanner.compute_confidence_tensor", _OLD, patched=False),
        Target(_MODEL, "DeepseekV4Model.forward"),
        Target(_GATE, "moe_fused_gate"),
        # Both import the gate when they run.
        Target("sglang.srt.layers.moe.topk", "biased_topk_jit_kernel_impl", patched=False),
        Target("sglang.srt.multimodal.dsv41.vl_routing", "vision_topk", patched=False),
        Target(_HASH, "HashTopK.forward"),
        Target(_VERIFY, "DsparkVerifyEpilogue._accept"),
        Target(_VERIFY, "DsparkVerifyEpilogue._static_epilogue", patched=False),
        Target(_VERIFY, "DsparkVerifyEpilogue._accept_static_greedy", _SINCE_23, patched=False),
        Target(_VERIFY, "DsparkVerifyEpilogue._serves_accept_tail", _SINCE_23, patched=False),
        Target(_VERIFY, "accept_draft_tokens"),
        Target(_ACCEPT, "AcceptGreedy.execute", patched=False),
        Target(_ACCEPT, "cap_correct_len", patched=False),
        Target(_OBSERVERS, "DsparkStepObservers.observe_verify_step"),
        Target(WORKER, "DSparkWorkerV2.__init__"),
        Target(WORKER, "DSparkWorkerV2._forward_decode", patched=False),
    )

    def __init__(self) -> None:
        self._cap: _Cap | None = None

    def install(self, patch: Patch) -> None:
        from ..engine.gates import Gates

        if self._cap is None:
            gates = Gates.from_env()
            self._cap = _Cap(gates["DSV41_VERIFY_CAP"], gates["DSV41_VERIFY_CAP_LOG"], patch.state, patch.release)
        cap = self._cap
        makers = {
            "build_dspark_v4_confidence_head": lambda original: cap.confidence_head(original, patch.module),
            "DeepseekV4ForCausalLMDSpark.compute_confidence": cap.compute_confidence,
            "DeepseekV4Model.forward": cap.forward,
            "moe_fused_gate": cap.gate,
            "HashTopK.forward": cap.hash_gate,
            "DsparkVerifyEpilogue._accept": cap.folded_accept,
            "accept_draft_tokens": cap.accept,
            "DsparkStepObservers.observe_verify_step": cap.observe,
            "DSparkWorkerV2.__init__": cap.worker_init,
        }
        for qualname in patch.qualnames:
            patch.wrap(qualname, makers[qualname])


class _Cap:
    """The runtime: one for the process. `cap` is a number of drafts, or the thresholds of drafts 2, 3, ..."""

    def __init__(self, cap: int | list[float], log: str | None, state: AdapterState, release: str) -> None:
        self.fixed = cap if isinstance(cap, int) else None
        self.thresholds = None if isinstance(cap, int) else [float(threshold) for threshold in cap]
        self.log = log
        self.state = state
        self.release = release
        self._on_device: Any = None
        self._broadcast: Any = None
        self._moe_layers: int | None = None
        self._logs = False

    # -- when the engine is built --------------------------------------------------------------------------------------

    def confidence_head(self, original: Any, module: Any) -> Any:
        def build_dspark_v4_confidence_head(**kwargs: Any) -> Any:
            if self.thresholds is None:
                return original(**kwargs)
            # The stock builder gives none in static mode; it asks by this name, and asks nothing else of it.
            stock = module.read_ragged_verify_mode
            module.read_ragged_verify_mode = lambda: None
            try:
                return original(**kwargs)
            finally:
                module.read_ragged_verify_mode = stock

        return build_dspark_v4_confidence_head

    def worker_init(self, original: Any) -> Any:
        def __init__(worker: Any, *args: Any, **kwargs: Any) -> None:
            original(worker, *args, **kwargs)
            if hosts_draft(worker):
                note("verify_cap", self.state, read_facts(worker, self.release))
                self.start(worker)

        return __init__

    def start(self, worker: Any) -> None:
        """Allocate what graphs will read, before any is captured."""
        import torch
        from sglang.srt.runtime_context import get_parallel
        from sglang.srt.speculative.spec_tp_sync import SpecTpSyncSite

        from ..engine.refusal import refuse

        epilogue = worker._verify_epilogue
        if epilogue is not None and hasattr(epilogue, "_fused_accept_tail"):
            epilogue._fused_accept_tail = False
        stride = int(worker.verify_num_draft_tokens)
        rows = stride if self.fixed is None else self.fixed + 1
        LIVE.allocate(_largest_graph(worker), stride, rows, worker.device)
        assert LIVE.buffer is not None
        self.state.holds("live rows", LIVE.buffer.numel() * LIVE.buffer.element_size())
        if self.thresholds is not None:
            if getattr(worker.draft_model, "confidence_head", None) is None:
                refuse(
                    "verify_cap: DSV41_VERIFY_CAP=conf needs a draft with a confidence head, and this one has none",
                    "Use a draft checkpoint that has one, or a fixed cap, on every rank.",
                )
            self._on_device = torch.tensor(self.thresholds, dtype=torch.float32, device=worker.device)
        sync = worker._tp_sync
        self._broadcast = lambda live: sync.sync(SpecTpSyncSite.DSPARK_PLAN, live)
        self._logs = self.log is not None and get_parallel().tp_rank == 0
        if self._logs:
            try:
                self._append("")
            except OSError as error:
                refuse(
                    f"verify_cap: DSV41_VERIFY_CAP_LOG={self.log} cannot be written on rank 0: {error}",
                    "Name a file in a folder that exists and can be written, or unset it.",
                )

    # -- the draft: how many rows are live -----------------------------------------------------------------------------

    def compute_confidence(self, original: Any) -> Any:
        def compute_confidence(model: Any, **kwargs: Any) -> Any:
            result = original(model, **kwargs)
            if self._on_device is not None:
                confidence = result[0] if isinstance(result, tuple) else result
                self.set_live(confidence)
            return result

        return compute_confidence

    def set_live(self, confidence: Any) -> None:
        """From float [bs, g]; in a graph's tail or eagerly."""
        from ..kernels.verify_cap import live_rows

        bs = confidence.shape[0]
        self._broadcast(live_rows(confidence.view(bs, -1), self._on_device, LIVE.rows(bs)))

    # -- the verify: dead rows take their anchor's experts -------------------------------------------------------------

    def forward(self, original: Any) -> Any:
        def forward(model: Any, input_ids: Any, positions: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
            bs = forward_batch.batch_size
            verifies = (
                LIVE.buffer is not None
                and bs > 0
                and forward_batch.forward_mode.is_target_verify()
                and input_ids.shape[0] == bs * LIVE.stride
            )
            if not verifies:
                return original(model, input_ids, positions, forward_batch, *args, **kwargs)
            with LIVE.scope(bs):
                result = original(model, input_ids, positions, forward_batch, *args, **kwargs)
            self.check_routed(model)
            return result

        return forward

    def check_routed(self, model: Any) -> None:
        """Every MoE layer must have routed by live rows: a layer that escaped would stream dead rows' experts."""
        from ..engine.refusal import refuse

        if self._moe_layers is None:
            self._moe_layers = sum(hasattr(module, "topk") and hasattr(module, "gate") for module in model.modules())
        if LIVE.routed != self._moe_layers:
            refuse(
                f"verify_cap: {LIVE.routed} of {self._moe_layers} MoE layers routed by live rows in a target verify",
                "Another MoE or router backend is in use than those that verify_cap knows: unset DSV41_VERIFY_CAP.",
            )
        self.state.fire()

    def gate(self, original: Any) -> Any:
        def moe_fused_gate(scores: Any, *args: Any, **kwargs: Any) -> Any:
            weights, ids = original(scores, *args, **kwargs)
            live = LIVE.of(scores.shape[0]) if kwargs.get("scoring_func") == "sqrtsoftplus" else None
            if live is not None:
                from ..kernels.verify_cap import copy_rows

                in_use = kwargs.get("num_token_non_padded")
                copy_rows(weights, ids, kwargs.get("packed_out"), live, LIVE.stride, in_use)
            return weights, ids

        return moe_fused_gate

    def hash_gate(self, original: Any) -> Any:
        def forward(topk: Any, hidden_states: Any, router_logits: Any, input_ids: Any, *args: Any, **kw: Any) -> Any:
            live = LIVE.of(input_ids.shape[0])
            if live is not None:
                from ..kernels.verify_cap import source_rows

                # The experts are the token's and the weights are the logits': both are the anchor's for a dead row.
                # Padding is still masked by the row's own index.
                source = source_rows(live, LIVE.stride)
                router_logits, input_ids = router_logits[source], input_ids[source]
            return original(topk, hidden_states, router_logits, input_ids, *args, **kw)

        return forward

    # -- the accept: at most the live drafts ---------------------------------------------------------------------------

    def folded_accept(self, original: Any) -> Any:
        def _accept(epilogue: Any, *, candidates: Any, cutoff_verify_lens: Any = None, **kwargs: Any) -> Any:
            if cutoff_verify_lens is None:
                cutoff_verify_lens = LIVE.rows(candidates.shape[0])
            return original(epilogue, candidates=candidates, cutoff_verify_lens=cutoff_verify_lens, **kwargs)

        return _accept

    def accept(self, original: Any) -> Any:
        def accept_draft_tokens(*, candidates: Any, cutoff_layout: Any = None, **kwargs: Any) -> Any:
            if cutoff_layout is None:
                cutoff_layout = LiveCutoff(LIVE.rows(candidates.shape[0]))
            return original(candidates=candidates, cutoff_layout=cutoff_layout, **kwargs)

        return accept_draft_tokens

    # -- DSV41_VERIFY_CAP_LOG ------------------------------------------------------------------------------------------

    def observe(self, original: Any) -> Any:
        def observe_verify_step(observers: Any, **kwargs: Any) -> Any:
            if self._logs:
                self.write(kwargs["bs"], kwargs["confidence"], kwargs["correct_len"])
            return original(observers, **kwargs)

        return observe_verify_step

    def write(self, bs: int, confidence: Any, correct_len: Any) -> None:
        """One JSON line a step; waits for the device. A file that cannot be written any more ends the log alone."""
        from ..engine.refusal import say

        line = {
            "confidence": None if confidence is None else [[round(c, 6) for c in row] for row in confidence.tolist()],
            "verified": (LIVE.rows(bs) - 1).tolist(),
            "accepted": correct_len[:bs].tolist(),
        }
        try:
            self._append(json.dumps(line) + "\n")
        except OSError as error:
            self._logs = False
            say(
                f"dsv41_dist: verify_cap: DSV41_VERIFY_CAP_LOG={self.log} cannot be written on rank 0: {error}; "
                "no further step is logged. Serving goes on; start again to log again."
            )

    def _append(self, text: str) -> None:
        assert self.log is not None
        with open(self.log, "a", encoding="utf-8") as out:
            out.write(text)


def _largest_graph(worker: Any) -> int:
    """The largest batch of which any draft or verify graph is captured; 1 where there are none."""
    from sglang.srt.runtime_context import get_exec

    sizes = [1]
    if worker._verify_epilogue is not None:
        sizes.append(int(worker._verify_epilogue.max_bs))
    config = get_exec().graph.cuda_graph_config
    if config is not None:
        sizes.extend(config.decode.bs or [])
    return max(sizes)
