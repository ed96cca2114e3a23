"""Run by the engine's interpreter: verify_cap around the real draft head, gates and accept functions. Prints JSON.

What needs a GPU is swapped at the innermost call: the target's forward pass (for one that calls the real gates) and the
worker's constructor.
"""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace

import torch
from sglang.srt.layers.moe import hash_topk
from sglang.srt.models import deepseek_v4, deepseek_v4_dspark
from sglang.srt.models.dspark import DSparkConfidenceHead
from sglang.srt.speculative.dspark_components import (
    dspark_draft_sampler,
    dspark_observability,
    dspark_verify,
    dspark_worker_v2,
)
from sglang.srt.speculative.spec_tp_sync import SpecTpSync

from dsv41_dist.adapters._speculative_live import LIVE, LiveCutoff
from tests.engine import speculative_stand_ins
from tests.engine.speculative_stand_ins import STRIDE, VOCAB, sampling_info, swap_innermost, worker_init

RELEASE = sys.argv[1]
CONF = os.environ.get("DSV41_VERIFY_CAP", "").startswith("conf")
BS, GAMMA, HIDDEN, RANK, EXPERTS, K = 3, STRIDE - 1, 8, 4, 64, 6
ALL = 1 << 30


def sync():
    return SpecTpSync(SimpleNamespace(world_size=1, rank_in_group=0))


def stock(function):
    while "dsv41_dist/adapters" in function.__code__.co_filename:
        function = function.__wrapped__
    return function


class MarkovEmbeddings:
    def __init__(self) -> None:
        self.table = torch.randn(VOCAB, RANK, generator=torch.Generator().manual_seed(1))

    def get_prev_embeddings(self, tokens):
        return self.table[tokens]


def draft_model():
    """The real confidence head in an object that the real compute_confidence takes for the draft model."""
    torch.manual_seed(4)
    head = DSparkConfidenceHead(hidden_size=HIDDEN, markov_rank=RANK, with_markov=True, bias=False)
    torch.nn.init.normal_(head.proj.weight, std=1.0)
    return SimpleNamespace(confidence_head=head, markov_head=MarkovEmbeddings(), gamma=GAMMA)


def confidence_of(model, drafts, hidden):
    names = {"draft_tokens": drafts, "confidence_features": hidden}
    if RELEASE == "0.5.21":
        names = {"sampled_tokens": drafts, "x_post_hc": hidden}
    anchors = torch.zeros(len(drafts), dtype=torch.int64)
    compute = deepseek_v4_dspark.DeepseekV4ForCausalLMDSpark.compute_confidence
    with torch.no_grad():
        result = compute(model, anchor_tokens=anchors, **names)
    return result[0] if isinstance(result, tuple) else result


def head_in_static_mode(out) -> None:
    config = SimpleNamespace(hidden_size=HIDDEN, enable_confidence_head=True)
    head = deepseek_v4_dspark.build_dspark_v4_confidence_head(config=config, markov_rank=RANK)
    bare = stock(deepseek_v4_dspark.build_dspark_v4_confidence_head)(config=config, markov_rank=RANK)
    out["head"] = [type(head).__name__, type(bare).__name__]


def causal(out, model) -> None:
    """Changing draft j and later never changes whether drafts 1..j are verified; and the lengths do vary."""
    gen = torch.Generator().manual_seed(2)
    broken, lengths = 0, set()
    for _ in range(40):
        drafts = torch.randint(0, VOCAB, (BS, GAMMA), generator=gen)
        hidden = torch.randn(BS, GAMMA, HIDDEN, generator=gen)
        confidence_of(model, drafts, hidden)
        first = LIVE.rows(BS).clone()
        lengths.update((first - 1).tolist())
        for j in range(1, GAMMA + 1):
            other = drafts.clone()
            other[:, j - 1 :] = torch.randint(0, VOCAB, (BS, GAMMA - j + 1), generator=gen)
            confidence_of(model, other, hidden)
            second = LIVE.rows(BS)
            # [L >= i] for i <= j: lengths cut at j are equal.
            broken += int((torch.clamp(first - 1, max=j) != torch.clamp(second - 1, max=j)).sum())
    out["causal"] = {"broken": broken, "lengths": sorted(lengths)}
    model.confidence_head.proj.weight.data.fill_(float("nan"))
    head = deepseek_v4_dspark
    names = [name for name in ("expect",) if hasattr(head, name)]
    for name in names:
        setattr(head, name, lambda *args, **kwargs: None)
    from sglang.srt.models import dspark as dense

    if hasattr(dense, "expect"):
        dense.expect = lambda *args, **kwargs: None
    confidence_of(model, torch.zeros(BS, GAMMA, dtype=torch.int64), torch.ones(BS, GAMMA, HIDDEN))
    out["nan"] = LIVE.rows(BS).tolist()


def make_hash_topk():
    topk = hash_topk.HashTopK.__new__(hash_topk.HashTopK)
    torch.nn.Module.__init__(topk)
    fields = {
        "layer_id": 0, "is_draft": False, "topk": K, "num_experts": EXPERTS, "score_func": "sqrtsoftplus",
        "routed_scaling_factor": 1.5, "apply_routed_scaling_factor_on_output": False, "enable_waterfill": False,
        "waterfill_balancer": None, "shared_experts": SimpleNamespace(num_shared_topk_slots=0),
        "num_fused_shared_experts": 0, "tid2eid": (torch.arange(VOCAB)[:, None] + torch.arange(K)).int() % EXPERTS,
    }  # fmt: skip
    for name, value in fields.items():
        if not isinstance(getattr(type(topk), name, None), property):
            setattr(topk, name, value)
    hash_topk.resolve_routing_inputs = lambda num_token_non_padded=None, **_: (num_token_non_padded, None)
    return topk


class Target(torch.nn.Module):
    """A target of three MoE layers: two with the fused gate, one hash-routed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Module() for _ in range(3))
        for layer in self.layers:
            layer.topk, layer.gate = torch.nn.Identity(), torch.nn.Identity()
        self.calls: list = []


def forward_batch(mode_verify: bool, bs: int):
    return SimpleNamespace(batch_size=bs, forward_mode=SimpleNamespace(is_target_verify=lambda: mode_verify))


def gates(out) -> None:
    from sglang.kernels.ops.moe import moe_fused_gate as module

    module.is_arch_support_pdl = lambda: False
    hash_layer = make_hash_topk()
    gen = torch.Generator().manual_seed(3)
    rows = BS * STRIDE
    scores = torch.randn(2, rows, EXPERTS, generator=gen)
    bias = torch.randn(EXPERTS, generator=gen)
    tokens = torch.randint(0, VOCAB, (rows,), generator=gen)
    escaped = []

    def forward(self, input_ids, positions, batch, *args, **kwargs):
        def gate(layer):
            return module.moe_fused_gate(scores[layer], bias, topk=K, scoring_func="sqrtsoftplus", renormalize=True)

        hashed = hash_layer(torch.zeros(rows, 1), scores[0], input_ids)
        self.calls = [gate(0)] if escaped else [gate(0), gate(1)]
        self.calls.append((hashed.topk_weights, hashed.topk_ids))

    model = Target()
    hash_topk.envs.SGLANG_OPT_USE_FUSED_HASH_TOPK.set(False)
    swap_innermost(deepseek_v4.DeepseekV4Model.forward, forward)
    run = deepseek_v4.DeepseekV4Model.forward
    run(model, tokens, None, forward_batch(False, BS), None)
    own = [tuple(t.clone() for t in call) for call in model.calls]
    results = []
    for live in ([2, 3, 6], [6, 6, 6], [4, 2, 2]):
        LIVE.rows(BS).copy_(torch.tensor(live))
        run(model, tokens, None, forward_batch(True, BS), None)
        source = [r if r % STRIDE < live[r // STRIDE] else r - r % STRIDE for r in range(rows)]
        results.append(all(torch.equal(got, want[source]) for call, stock_call in zip(model.calls, own, strict=True)
                           for got, want in zip(call, stock_call, strict=True)))  # fmt: skip
    out["gates"] = results
    # Another number of rows than a fixed-shape verify (a prefill that is called a verify) is left alone.
    run(model, tokens[: rows - 1].repeat(2)[:rows], None, forward_batch(True, BS + 1), None)
    out["other shape is stock"] = torch.equal(model.calls[0][1], own[0][1])
    escaped.append(True)
    try:
        run(model, tokens, None, forward_batch(True, BS), None)
        out["escape"] = "went on"
    except SystemExit as refusal:
        out["escape"] = str(refusal)


def case(seed, top_ks=None):
    gen = torch.Generator().manual_seed(seed)
    logits = torch.randn(BS, STRIDE, VOCAB, generator=gen)
    tokens = torch.randint(0, VOCAB, (BS, STRIDE), generator=gen)
    # Make the target agree with most drafts, so that caps bite.
    for b in range(BS):
        for k in range(GAMMA - (seed + b) % 3):
            logits[b, k, tokens[b, k + 1]] = 9.0
    return tokens, logits, sampling_info([[0.9]] * BS, top_ks or [1] * BS)


def make_epilogue(**extra):
    return dspark_verify.DsparkVerifyEpilogue(
        max_bs=4, verify_num_draft_tokens=STRIDE, device="cpu", tp_sync=sync(), **extra
    )


def greedy_accepts(out) -> None:
    """Folded and eager: the drafts that are accepted, and the text, are a prefix of what an uncapped verify says."""
    checks = []
    for seed in range(6):
        tokens, logits, info = case(seed)
        live = torch.randint(2, STRIDE + 1, (BS,), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
        LIVE.rows(BS).copy_(live)
        flat = logits.view(BS * STRIDE, VOCAB)
        greedy = logits.argmax(-1)
        epilogue = make_epilogue()
        epilogue._accept(
            candidates=tokens, logits=flat, draft_tokens=tokens[:, 1:].contiguous(), seq_lens=torch.zeros(BS).long()
        )
        folded = epilogue.read_accept(BS)
        block = SimpleNamespace(greedy_mask=torch.ones(BS, dtype=torch.bool))
        eager = dspark_verify.accept_draft_tokens(
            candidates=tokens, target_logits=flat, draft_block=block, sampling_info=info, draft_input=None,
            gamma=GAMMA, verify_num_draft_tokens=STRIDE,
        )  # fmt: skip
        full = stock(dspark_verify.accept_draft_tokens)(
            candidates=tokens, target_logits=flat, draft_block=block, sampling_info=info, draft_input=None,
            gamma=GAMMA, verify_num_draft_tokens=STRIDE,
        )  # fmt: skip
        wanted = torch.minimum(full[0].long(), live.long() - 1)
        text = all(
            folded.out_tokens[b, : int(wanted[b]) + 1].tolist() == greedy[b, : int(wanted[b]) + 1].tolist()
            for b in range(BS)
        )
        checks.append(
            torch.equal(folded.correct_len.long(), wanted)
            and torch.equal(eager[0].long(), wanted)
            and torch.equal(eager[1], folded.bonus)
            and text
        )
    out["greedy"] = checks


def sampled_accepts(out) -> None:
    """A sampled run under a cap is the stock run with the engine's own cutoff."""
    from sglang.srt.speculative.dspark_components.dspark_draft import DraftBlockResult

    checks = []
    for seed in range(6):
        tokens, logits, info = case(seed, top_ks=[ALL] * BS)
        fields = {
            "draft_tokens": tokens[:, 1:],
            "corrected_logits": logits[:, :GAMMA] + 0.5,
            "greedy_mask": torch.zeros(BS, dtype=torch.bool),
            "temperatures": torch.ones(BS),
            "greedy_draft": False,
        }
        block = DraftBlockResult(**{name: fields[name] for name in DraftBlockResult.__struct_fields__})
        live = torch.tensor([2, 4, 6], dtype=torch.int32)
        LIVE.rows(BS).copy_(live)
        results = []
        for function, extra in (
            (dspark_verify.accept_draft_tokens, {}),
            (stock(dspark_verify.accept_draft_tokens), {"cutoff_layout": LiveCutoff(live)}),
        ):
            torch.manual_seed(seed)
            result = function(
                candidates=tokens, target_logits=logits.view(-1, VOCAB), draft_block=block, sampling_info=info,
                draft_input=None, gamma=GAMMA, verify_num_draft_tokens=STRIDE, **extra,
            )  # fmt: skip
            results.append([t.clone() for t in result])
        checks.append(
            all(torch.equal(a, b) for a, b in zip(*results, strict=True)) and bool((results[0][0] < live).all())
        )
    out["sampled"] = checks


def region_and_tail(out, worker) -> None:
    from sglang.srt.speculative.dspark_components import dspark_sampling_accept_graph as region

    out["tail after"] = [worker._verify_epilogue._serves_accept_tail(bs) for bs in (1, 4)]
    tokens, logits, _ = case(1)
    # The real sampler: draft_tau gives it a buffer of its own.
    sampler = dspark_draft_sampler.DsparkDraftSampler(
        model=speculative_stand_ins.draft_model(),
        gamma=GAMMA,
        max_bs=4,
        device="cpu",
        noise=None,
        tp_sync=sync(),
        greedy_draft=False,
    )
    sampler.stage_sampling_params(bs=BS, sampling_info=sampling_info([[1.0]] * BS, [ALL] * BS))
    sampler.step_logits = torch.randn(4, GAMMA, VOCAB)
    epilogue = make_epilogue()
    lengths = []
    for live in ([2, 2, 2], [3, 6, 2]):
        LIVE.rows(BS).copy_(torch.tensor(live))
        region.sampling_accept_commit_lens(
            SimpleNamespace(candidates=tokens, logits=logits.view(-1, VOCAB), seq_lens=torch.zeros(BS).long()),
            verify_lens=torch.full((BS,), STRIDE),
            gate=torch.ones(1),
            gated=False,
            draft_sampler=sampler,
            epilogue=epilogue,
            tp_sync=sync(),
            fused_argmax=False,
            block_verification=False,
            rejection_noise=None,
        )
        lengths.append(bool((epilogue.read_accept(BS).commit_lens <= torch.tensor(live)).all()))
    out["region"] = lengths


def logged(out) -> None:
    observe = dspark_observability.DsparkStepObservers.observe_verify_step
    swap_innermost(observe, lambda self, **kwargs: None)
    LIVE.rows(BS).copy_(torch.tensor([2, 3, 6]))
    confidence = torch.full((BS, GAMMA), 0.25)
    observe(None, bs=BS, confidence=confidence, correct_len=torch.tensor([1, 0, 5, 9]))
    with open(os.environ["DSV41_VERIFY_CAP_LOG"], encoding="utf-8") as lines:
        out["log"] = [json.loads(line) for line in lines]


def main() -> None:
    from dsv41_dist.engine import boot

    out: dict = {}
    head_in_static_mode(out)
    model = draft_model()
    epilogue = make_epilogue(**({"fused_accept_tail": True} if RELEASE == "0.5.23" else {}))
    if RELEASE == "0.5.23":
        out["tail before"] = [epilogue._serves_accept_tail(bs) for bs in (1, 4)]
    mode = sys.argv[2] if len(sys.argv) > 2 else "static"
    worker = worker_init(dspark_worker_v2, {"_verify_epilogue": epilogue, "draft_model": model}, mode=mode)
    out["initial"] = LIVE.buffer.tolist()
    address = LIVE.buffer.data_ptr()
    if CONF:
        causal(out, model)
    gates(out)
    greedy_accepts(out)
    sampled_accepts(out)
    if RELEASE == "0.5.23":
        region_and_tail(out, worker)
    logged(out)
    out["one address"] = LIVE.rows(BS).data_ptr() == address
    out["larger than any graph"] = LIVE.rows(9).tolist()
    print(json.dumps(out | {"report": boot.report()}))


main()
