"""block_verify (DSV41_BLOCK_VERIFY): sampled rows are accepted by block verification instead of token by token.

The rule is Algorithm 2 of Sun et al., Block Verification Accelerates Speculative Decoding (ICLR 2025): the emitted
tokens follow the target's law exactly, and the expected number of accepted drafts is never below the token-wise rule's.
The target's law is the stock sampler's (temperature, top-k, top-p), the draft's is what the draft sampled from.

`1`: our kernel (kernels/block_verify.py), in every release. It reads logits, is spread over the vocabulary, and cannot
emit a token outside the target's support. `native`: the engine's own kernel, 0.5.22 and later, as with
--speculative-use-block-verification.

Greedy batches and ragged verify keep the stock rule. A simulated accept passes no sampling info and is left alone.

Noise: counter-based, keyed by the server's random seed, on which the ranks agree by name before the first step; so
every rank decides the same without a broadcast (the engine broadcasts the result at its own site as well).

Guarantee: exact in distribution; greedy text identical.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from ._speculative_live import LiveCutoff
from ._speculative_modes import WORKER, hosts_draft, note, read_facts
from .base import Adapter, AdapterState, Guarantee, Patch, Target

if TYPE_CHECKING:
    from ..kernels.block_verify import NoiseState

__all__ = ["BlockVerify"]

_ROOM = "sglang.srt.speculative.dspark_components."
_VERIFY, _REGION = _ROOM + "dspark_verify", _ROOM + "dspark_sampling_accept_graph"
_ACCEPT = "sglang.kernels.ops.speculative.dspark.dspark_accept"
_UTILS = "sglang.srt.speculative.dflash_utils"
_OLD, _SINCE_23 = ("0.5.21",), ("0.5.23",)
# XORed into the server's seed, so that the noise is not the draft's, nor the engine's own rejection noise.
_NOISE_DOMAIN = 0x51B10C4E51F1ED33


class BlockVerify(Adapter):
    name = "block_verify"
    summary = "Accept sampled drafts by block verification: the same law, more tokens a step."
    guarantee = Guarantee.EXACT_IN_DISTRIBUTION
    docs = "docs/speculative.md"
    targets = (
        Target(_VERIFY, "accept_draft_tokens"),
        # The callers: what they pass, and what they do with the three results.
        Target(_VERIFY, "TargetVerifyExecutor.accept_and_finalize", patched=False),
        Target(_REGION, "sampling_accept_commit_lens", _SINCE_23, patched=False),
        Target(_VERIFY, "_draft_probs", _SINCE_23, patched=False),
        # The stock law, which ours must be.
        Target(_ACCEPT, "_accept_sampling_core", patched=False),
        Target(_ACCEPT, "SelectMixedAccept.execute", patched=False),
        Target(_UTILS, "build_dflash_verify_target_probs", _OLD, patched=False),
        Target(_UTILS, "build_speculative_verify_target_probs", ("0.5.22", "0.5.23"), patched=False),
        Target(WORKER, "DSparkWorkerV2.__init__"),
    )

    def __init__(self) -> None:
        self._verifier: _Verifier | None = None

    def install(self, patch: Patch) -> None:
        from ..engine.gates import Gates

        if self._verifier is None:
            native = Gates.from_env()["DSV41_BLOCK_VERIFY"] == "native"
            self._verifier = _Verifier(native, patch.state, patch.release)
        for qualname in patch.qualnames:
            if qualname == "accept_draft_tokens":
                patch.wrap(qualname, partial(self._verifier.accept, module=patch.module))
            else:
                patch.wrap(qualname, self._verifier.worker_init)


class _Verifier:
    """The runtime: one for the process, shared by the eager accept and the sampling-accept region."""

    def __init__(self, native: bool, state: AdapterState, release: str) -> None:
        self.native = native
        self.state = state
        self.release = release
        self.noise: NoiseState | None = None

    def worker_init(self, original: Any) -> Any:
        def __init__(worker: Any, *args: Any, **kwargs: Any) -> None:
            original(worker, *args, **kwargs)
            if not hosts_draft(worker):
                return
            note("block_verify", self.state, read_facts(worker, self.release))
            if not self.native:
                self.start(int(worker.target_worker.random_seed), worker.device)

        return __init__

    def start(self, random_seed: int, device: Any) -> None:
        """Make the noise, after the ranks stated the same seed. Outside any capture: its address is baked in."""
        from ..engine import boot
        from ..kernels.block_verify import NoiseState

        armed = boot.armed()
        if armed is not None and armed.group is not None and not armed.ready:
            armed.group.same({"random seed": random_seed}, label="block_verify:noise")
        self.noise = NoiseState(random_seed ^ _NOISE_DOMAIN, device)
        self.state.holds("noise", self.noise.state.nbytes + self.noise.arrivals.nbytes)

    def accept(self, original: Any, *, module: Any) -> Any:
        def accept_draft_tokens(*, sampling_info: Any, cutoff_layout: Any = None, **kwargs: Any) -> Any:
            kwargs["cutoff_layout"] = cutoff_layout
            greedy = sampling_info is None or sampling_info.is_all_greedy
            ragged = cutoff_layout is not None and not isinstance(cutoff_layout, LiveCutoff)
            if greedy or ragged:
                return original(sampling_info=sampling_info, **kwargs)
            self.state.fire()
            if self.native:
                kwargs["block_verification"] = True
                return original(sampling_info=sampling_info, **kwargs)
            sampled = self.sampled(sampling_info=sampling_info, **kwargs)
            if not sampling_info.is_any_greedy:
                return sampled
            # Without sampling info the stock function accepts greedily.
            greedy_rows = original(sampling_info=None, **kwargs)
            names = ("len", "bonus", "trim")
            selected = module.SelectMixedAccept.execute(
                greedy_mask=kwargs["draft_block"].greedy_mask,
                **{f"greedy_{name}": value for name, value in zip(names, greedy_rows, strict=True)},
                **{f"sampling_{name}": value for name, value in zip(names, sampled, strict=True)},
            )
            return selected.correct_len, selected.bonus, selected.cap_trim_lens

        return accept_draft_tokens

    def sampled(
        self,
        *,
        candidates: Any,
        target_logits: Any,
        draft_block: Any,
        sampling_info: Any,
        draft_input: Any,
        cutoff_layout: LiveCutoff | None,
        **_: Any,
    ) -> tuple[Any, Any, Any]:
        """(correct_len int32, bonus int64, cap_trim_lens int32), each [bs], as the stock sampler returns them."""
        import torch

        from ..kernels.block_verify import block_verify

        if self.noise is None:
            raise RuntimeError("block_verify: drafts are accepted before the DSpark worker was built")
        target, temperatures = target_logits, sampling_info.temperatures
        if sampling_info.need_top_k_sampling or sampling_info.need_top_p_sampling:
            target, temperatures = _truncated_law(candidates, target_logits, sampling_info, draft_input), None
        verdict = block_verify(
            candidates=candidates,
            target=target,
            draft_logits=None if getattr(draft_block, "greedy_draft", False) else draft_block.corrected_logits,
            target_temperatures=temperatures,
            draft_temperatures=draft_block.temperatures,
            noise=self.noise,
            live=None if cutoff_layout is None else cutoff_layout.verify_lens,
        )
        return verdict.correct_len, verdict.bonus, torch.zeros_like(verdict.correct_len)


def _truncated_law(candidates: Any, target_logits: Any, sampling_info: Any, draft_input: Any) -> Any:
    """The target's probabilities after temperature, top-k and top-p, by the engine's own function."""
    from sglang.srt.speculative import dflash_utils

    name = "speculative" if hasattr(dflash_utils, "build_speculative_verify_target_probs") else "dflash"
    bs, rows = candidates.shape
    return getattr(dflash_utils, f"build_{name}_verify_target_probs")(
        next_token_logits=target_logits,
        sampling_info=sampling_info,
        draft_token_num=rows,
        bs=bs,
        max_top_k=draft_input.max_top_k,
        uniform_top_k_value=draft_input.uniform_top_k_value,
    )
