"""hc_fused (DSV41_HC_FUSED): hyper-connection mix statistics of prefill rows in one pass over K.

The engine splits K = 20480 over 80 programs per row tile, writes 80 partial sums and adds them in a second kernel: at
8192 rows 63 MB written and read again, of 335 MB of input. Here one program walks the slices in the same order
(kernels/hc_fused.py), and the engine's own kernel makes the coefficients from the sums. Decode and verify keep the
stock kernels: they have too few rows, and run hidden on a side stream.

Guarantee: bit-identical. Each size (a power of two rows and stock's tile height there) is compared with the stock
kernels at its first eager prefill call on every rank; one differing byte turns it off for good on all of them. Off
where the ranks run other rows (attention data or context parallelism): they could not vote. Used from
DSV41_HC_FUSED_MIN rows; unset, each power of two from 512 rows on is measured at that first call, and is fused where
that is faster on every rank.
Composes with prefill_sp: sizes count the rows that a kernel choice is made for (engine/logical_rows.py).
Source: the published adapter of the same name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .base import Adapter, AdapterState, Guarantee, Patch, Target, after_load

if TYPE_CHECKING:
    from ._hc_runtime import HcFused

__all__ = ["HcFusedAdapter", "attach"]

_MHC = "sglang.kernels.ops.layernorm.mhc"
_RUNNER = "sglang.srt.model_executor.model_runner"
_MODEL = "sglang.srt.models.deepseek_v4"
_STAGES = "sglang.srt.models.deepseek_v4_mhc"

_fused: HcFused | None = None  # made by `attach`; one target model per process


class HcFusedAdapter(Adapter):
    name = "hc_fused"
    summary = "Hyper-connection mix statistics of prefill rows in one pass over K, without partial sums in memory."
    guarantee = Guarantee.BIT_IDENTICAL
    docs = "docs/prefill_kernels.md"
    targets = (
        Target(_RUNNER, "ModelRunner.load_model"),
        Target(_MODEL, "DeepseekV4Model.forward"),
        Target(_MHC, "hc_mix_stats_sinkhorn"),
        Target(_MHC, "_hc_mix_stats_partial_kernel", patched=False),
        Target(_MHC, "_hc_mix_reduce_sinkhorn_kernel", patched=False),
        Target(_MHC, "_num_slices_for", patched=False),
        Target(_MHC, "_block_m_for", patched=False),
        # Who calls it, with what, on which stream.
        Target(_MODEL, "DeepseekV4DecoderLayer._hc_mix_stats", ("0.5.21",), patched=False),
        Target(_STAGES, "_mix_stats_impl", ("0.5.22", "0.5.23"), patched=False),
        Target("sglang.srt.layers.logits_processor", "get_in_autotune_dummy_run", patched=False),
    )

    def install(self, patch: Patch) -> None:
        if patch.module.__name__ == _RUNNER:
            patch.wrap("ModelRunner.load_model", after_load(attach, patch.state))
        elif patch.module.__name__ == _MODEL:
            patch.wrap("DeepseekV4Model.forward", _forward)
        else:
            patch.wrap("hc_mix_stats_sinkhorn", _stats)


def attach(runner: Any, state: AdapterState) -> None:
    """Make the runtime once the target model is loaded. Collective over the TP group."""
    global _fused
    if runner.is_draft_worker:
        return
    from sglang.kernels.ops.layernorm import mhc  # pyright: ignore[reportMissingImports]

    from ..engine.gates import Gates
    from ._hc_runtime import HcFused
    from ._split_group import communicator, other_rows

    # A size is decided by a vote at its first call: ranks with other rows would each ask for another vote.
    why = "on HIP the engine makes these statistics with other kernels" if mhc._is_hip else other_rows()
    if why is not None:
        state.notes.append(f"off: {why}")
        return
    _fused = HcFused(communicator(state), state, mhc, Gates.from_env()["DSV41_HC_FUSED_MIN"])


def _forward(original: Any) -> Any:
    """The target model's forward; draft stages have models of their own."""

    def forward(self: Any, input_ids: Any, positions: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        if _fused is None or not _is_prefill(forward_batch.forward_mode):
            return original(self, input_ids, positions, forward_batch, *args, **kwargs)
        with _fused.prefill():
            return original(self, input_ids, positions, forward_batch, *args, **kwargs)

    return forward


def _is_prefill(mode: Any) -> bool:
    from sglang.srt.layers.logits_processor import (  # pyright: ignore[reportMissingImports]
        get_in_autotune_dummy_run,
    )

    return mode.is_extend() and not mode.is_target_verify() and not get_in_autotune_dummy_run()


def _stats(original: Any) -> Any:
    def hc_mix_stats_sinkhorn(
        x_flat: Any,
        hc_fn: Any,
        hc_scale: Any,
        hc_base: Any,
        hc_mult: int,
        sinkhorn_iters: int,
        rms_eps: float,
        hc_eps: float,
    ) -> Any:
        arguments = (x_flat, hc_fn, hc_scale, hc_base, hc_mult, sinkhorn_iters, rms_eps, hc_eps)
        return original(*arguments) if _fused is None else _fused.run(original, arguments)

    return hc_mix_stats_sinkhorn
