"""prefill_sp (DSV41_PREFILL_SP=1|comm): sequence-parallel prefill for DeepSeek-V4.1.

In prefill every rank of a TP group repeats the row-local work (hyper-connection statistics, combine, norm and update,
Engram's projection and gate) on every row, and each sublayer ends in an all-reduce. Here a rank holds its share of a
chunk's rows between the sublayers: attention and MoE take gathered rows and give back the held rows of their sum. A
gather and a reduce-scatter move the bytes of the all-reduce; the row-local work is divided by the number of ranks.

The engine's own loop and layers run, on shards: what is replaced are the cross-row operators and the seams that index
whole rows. Every kernel choice by row count is made for the whole chunk (_prefill_rewrite.py, logical_rows.py), so that
a per-row kernel gives the bits it gives there; Engram's projection, a GEMM, is sharded where SelfCheck saw its bytes.
A chunk that is small, does not divide, or is not an eager prefill of the target is stock, on every rank.

Guarantee: bit-identical with DSV41_PREFILL_SP_EXACT=1, which keeps the all-reduce; a reordered sum without.
Source: the published adapter of the same name; sequence parallelism of Megatron-LM, arXiv 2205.05198.
"""

from __future__ import annotations

import inspect
import os
from typing import Any

from .base import Adapter, AdapterState, Guarantee, Patch, Target, after_load

__all__ = ["PrefillSp", "attach", "attach_model"]

_MODEL = "sglang.srt.models.deepseek_v4"
_MHC = "sglang.srt.models.deepseek_v4_mhc"
_BOUNDARY = "sglang.srt.models.deepseek_v4_boundary"
_STAGE = "sglang.srt.models.deepseek_v4_platform_stage"
_TRANSPORT = "sglang.srt.models.deepseek_common.moe_transport"
_BACKEND = "sglang.srt.layers.attention.deepseek_v4_backend"
_ENGRAM = "sglang.srt.layers.engram"
_BASE = "sglang.srt.layers.layer_boundary"
_KERNELS = "sglang.kernels.ops.layernorm"
_AUX = "sglang.srt.layers.aux_hidden_states"
_QUANT = "sglang.srt.layers.quantization"
_RUNNER = "sglang.srt.model_executor.model_runner"
_SP = "_dsv41_prefill_sp"
_21, _22, _23 = ("0.5.21",), ("0.5.22",), ("0.5.23",)

_LAYER = "DeepseekV4DecoderLayer"
_LOOP = "DeepseekV4Model._forward_layers_hc_pre_from_prev"
_STATS_STREAM = f"{_LAYER}._get_hc_stats_stream"

# Functions on rows that choose kernels by their number, with the arguments that are rows.
_ROW_OPS: dict[str, dict[str, tuple[str, ...]]] = {
    _MHC: {
        "_mix_stats_impl": ("x",),
        "_combine": ("state",),
        "post": ("x", "residual", "post_mix", "comb"),
        "_post_fusion": ("y", "residual", "coefficients"),
    },
    _MODEL: {
        f"{_LAYER}._hc_combine": ("x", "apply_pre", "normalized", "combined"),
        f"{_LAYER}._hc_mix_stats": ("x",),
        f"{_LAYER}._hc_post_with_combine": ("x", "residual", "post", "comb", "pre"),
        f"{_LAYER}.hc_post": ("x", "residual", "post", "comb"),
    },
}
# Kernel launchers under them.
_LAUNCHERS: dict[str, tuple[str, ...]] = {
    f"{_KERNELS}.mhc": ("_block_m_for", "_num_stages_for", "hc_mix_stats_sinkhorn_bf16x3", "mhc_post"),
    f"{_KERNELS}.hc_combine_norm": ("hc_combine_norm",),
    f"{_KERNELS}.mhc_post_split_h": ("mhc_post_split_h",),
    f"{_KERNELS}.mhc_post_combine": ("mhc_post_combine", "hc_norm_prefill"),
}


class PrefillSp(Adapter):
    name = "prefill_sp"
    summary = "Shard a prefill chunk's rows over the group between attention and MoE."
    docs = "docs/prefill_sp.md"
    targets = (
        Target(_RUNNER, "ModelRunner.load_model"),
        Target(_MODEL, _LOOP),
        Target(_MODEL, "MQALayer.forward"),
        Target(_ENGRAM, "Engram.forward"),
        Target(_BACKEND, "LateLayerTail.rows"),
        Target(_BACKEND, "DeepseekV4AttnBackend.enter_late_layer_tail"),
        # Row counts.
        *(Target(_MHC, name, (*_22, *_23)) for name in _ROW_OPS[_MHC]),
        *(Target(_MODEL, name, _21) for name in _ROW_OPS[_MODEL]),
        Target(_MODEL, _STATS_STREAM, _21),
        Target(f"{_KERNELS}.mhc", "_block_m_for"),
        Target(f"{_KERNELS}.mhc", "_num_stages_for", _21),
        Target(f"{_KERNELS}.mhc", "hc_mix_stats_sinkhorn_bf16x3"),
        Target(f"{_KERNELS}.mhc", "mhc_post", _23),
        Target(f"{_KERNELS}.hc_combine_norm", "hc_combine_norm"),
        Target(f"{_KERNELS}.mhc_post_split_h", "mhc_post_split_h"),
        Target(f"{_KERNELS}.mhc_post_combine", "mhc_post_combine", _21),
        Target(f"{_KERNELS}.mhc_post_combine", "hc_norm_prefill", _21),
        # The MoE and the seams of each release.
        Target(_MODEL, f"{_LAYER}._run_moe_ffn_dp_sync", (*_21, *_22)),
        Target(_STAGE, "NonCudaDecoderMixin._run_moe_ffn_dp_sync", _23),
        Target(_MODEL, "DeepseekV4CudaDecoderLayer._bind_moe_transport", _23),
        Target(_BACKEND, "DeepseekV4AttnBackend.write_tail_source_kv", _23),
        Target(_AUX, "AuxHiddenStatePacker.slot", _23),
        Target(f"{_KERNELS}.mhc", "mhc_stream_mean", _23),
        # What these mean to their callers, and what else the layers do with rows.
        Target(_MODEL, "DeepseekV4Model.forward", patched=False),
        Target(_MODEL, "DeepseekV4Model._forward_impl", _23, patched=False),
        Target(_MODEL, f"{_LAYER}.forward_hc_pre_from_prev", (*_21, *_22), patched=False),
        Target(_MODEL, "DeepseekV4CudaDecoderLayer.forward", _23, patched=False),
        Target(_STAGE, "NonCudaDecoderMixin.forward_hc_pre_from_prev", _23, patched=False),
        Target(_MODEL, "MQALayer._project_wo_b", (*_22, *_23), patched=False),
        # What a pair of values and scales means to attention and to its linears (DSV41_PREFILL_SP_FP8).
        Target(_MODEL, "MQALayer._forward_prepare", patched=False),
        Target(_MODEL, "MQALayer._compute_kv_to_cache", patched=False),
        Target("sglang.srt.layers.linear", "ReplicatedLinear.forward", patched=False),
        Target(f"{_QUANT}.fp8", "Fp8LinearMethod.apply", patched=False),
        Target(f"{_QUANT}.fp8_utils", "triton_w8a8_block_fp8_linear", patched=False),
        Target(f"{_QUANT}.fp8_utils", "deepgemm_w8a8_block_fp8_linear_with_fallback", patched=False),
        Target(f"{_QUANT}.fp8_utils", "flashinfer_mxfp8_blockscaled_linear", patched=False),
        Target(f"{_QUANT}.mxfp8_input", "Mxfp8SwizzledInput", patched=False),
        Target("sglang.kernels.ops.quantization.fp8_kernel", "sglang_per_token_group_quant_fp8", patched=False),
        Target("sglang.srt.layers.linear", "RowParallelLinear.forward", patched=False),
        Target("sglang.srt.layers.moe.utils", "should_skip_mlp_all_reduce", patched=False),
        Target("sglang.srt.layers.moe.utils", "should_skip_post_experts_all_reduce", patched=False),
        Target("sglang.srt.models.deepseek_v2", "DeepseekV2MoE.forward", patched=False),
        Target("sglang.srt.models.deepseek_v2", "DeepseekV2MoE.forward_normal", patched=False),
        Target("sglang.srt.models.deepseek_v2", "MoEOutput.get_merged", (*_22, *_23), patched=False),
        Target(_MHC, "HcState", (*_22, *_23), patched=False),
        Target(_MHC, "run_attn_post", (*_22, *_23), patched=False),
        Target(_MHC, "run_moe_post", (*_22, *_23), patched=False),
        Target(_MHC, "_can_use_mega_mhc", (*_22, *_23), patched=False),
        Target(_BOUNDARY, "AttentionTransport", _23, patched=False),
        Target(_BOUNDARY, "MoeTransport", _23, patched=False),
        Target(_BOUNDARY, "HcReadCall", _23, patched=False),
        Target(_BOUNDARY, "HcUpdate", _23, patched=False),
        Target(_BOUNDARY, "materialize", _23, patched=False),
        Target(f"{_BASE}.row_transport", "TransportExit", _23, patched=False),
        Target(f"{_BASE}.row_transport", "validate_invocation", _23, patched=False),
        Target(_TRANSPORT, "MoeRowTransport", _23, patched=False),
        Target(_TRANSPORT, "MoeFinalize.complete", _23, patched=False),
        Target(_ENGRAM, "EngramEmbedding.forward", patched=False),
        Target(_ENGRAM, "EngramEmbedding._lookup", patched=False),
        Target(_ENGRAM, "EngramEmbedding._owned_rows", patched=False),
        Target(_ENGRAM, "engram_gate", patched=False),
        Target(_ENGRAM, "Engram.embed_rows", _23, patched=False),
        Target("sglang.srt.layers.logits_processor", "get_in_autotune_dummy_run", patched=False),
    )

    @property
    def guarantee(self) -> Guarantee:  # pyright: ignore[reportIncompatibleVariableOverride]
        """As the environment has it: the all-reduce is kept, or its sum is reordered."""
        exact = os.environ.get("DSV41_PREFILL_SP_EXACT", "").strip().lower() in ("1", "on", "true")
        return Guarantee.BIT_IDENTICAL if exact else Guarantee.REORDERED_SUM

    def install(self, patch: Patch) -> None:
        from ..engine.gates import Gates
        from ._prefill_runtime import Options

        Options.from_gates(Gates.from_env())  # what contradicts is refused before a weight is loaded
        module = patch.module.__name__
        for qualname in patch.qualnames:
            if qualname in _ROW_OPS.get(module, {}):
                args = _ROW_OPS[module][qualname]
                patch.wrap(qualname, lambda original, args=args: _row_op(original, args))
            elif qualname in _LAUNCHERS.get(module, ()):
                patch.wrap(qualname, _launcher)
            elif qualname == "ModelRunner.load_model":
                patch.wrap(qualname, after_load(attach, patch.state))
            elif qualname == _LOOP:
                patch.wrap(qualname, lambda original: _loop(original, rewrite=patch.release not in _23))
            else:
                patch.wrap(qualname, _WRAPPERS[qualname.rpartition(".")[2]])


def attach(runner: Any, state: AdapterState) -> None:
    """Shard the prefill of a loaded ModelRunner's target from now on. Collective over its TP group.

    What is declined is declined on all ranks and noted in the boot report with the reason.
    """
    from ..engine.gates import Gates
    from ._prefill_gate import model_refusal
    from ._prefill_runtime import Options

    if runner.is_draft_worker:
        return
    loop = _LOOP.rpartition(".")[2]
    model = next((module for module in runner.model.modules() if hasattr(type(module), loop)), None)
    why = model_refusal(runner, model)
    if why is not None:
        state.notes.append(f"no chunk is sharded: {why}")
        return
    attach_model(model, state, Options.from_gates(Gates.from_env()))


def attach_model(model: Any, state: AdapterState, options: Any) -> None:
    """The part of `attach` that needs no ModelRunner: `model` is a DeepseekV4Model. Collective over the TP group."""
    from sglang.srt.distributed.parallel_state import get_tp_group  # pyright: ignore[reportMissingImports]
    from sglang.srt.models.deepseek_v4 import MQALayer  # pyright: ignore[reportMissingImports]

    from ._prefill_runtime import Prefill
    from ._split_group import communicator

    defers = "defer_all_reduce" in inspect.signature(MQALayer.forward).parameters
    model.__dict__[_SP] = Prefill(communicator(state), get_tp_group(), state, options, model, defers)


def _loop(original: Any, rewrite: bool) -> Any:
    """The loop over the layers. `rewrite`: the release compares row counts, or ids of all rows, in the loop itself."""
    from ._prefill_chunk import own_rows
    from ._prefill_rewrite import by_logical_rows

    inner = by_logical_rows(original, own_rows)[0] if rewrite else original

    def run(self: Any, positions: Any, hidden_states: Any, *rest: Any) -> Any:
        # The engine hands the input over without keeping it, so that the loop can free it: no reference may stay here.
        box = [hidden_states]
        del hidden_states
        prefill = self.__dict__.get(_SP)
        if prefill is None:
            return original(self, positions, box.pop(), *rest)
        return prefill.run(original, inner, self, positions, box, rest)

    return run


def _row_op(original: Any, args: tuple[str, ...]) -> Any:
    from ._prefill_chunk import active
    from ._prefill_debug import RowOp
    from ._prefill_rewrite import by_logical_rows

    sharded = by_logical_rows(original)[0]
    op = RowOp(original, sharded, args)

    def run(*args: Any, **kwargs: Any) -> Any:
        chunk = active()
        if chunk is None or not chunk.scope.sharded:
            return original(*args, **kwargs)
        if chunk.debug is not None:
            return chunk.debug.row_op(chunk, op, args, kwargs)
        return sharded(*args, **kwargs)

    return run


def _launcher(original: Any) -> Any:
    from ._prefill_chunk import active
    from ._prefill_rewrite import by_logical_rows

    sharded = by_logical_rows(original)[0]

    def run(*args: Any, **kwargs: Any) -> Any:
        return (original if active() is None else sharded)(*args, **kwargs)

    return run


def _attention(original: Any) -> Any:
    from ._prefill_chunk import current

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        chunk = current()
        if chunk is None:
            return original(self, *args, **kwargs)
        if not chunk.live:
            chunk.tail_done()
            return original(self, *args, **kwargs)
        if args:
            raise TypeError("prefill_sp: a V4.1 layer calls its attention by keywords")
        return chunk.attention(original, self, kwargs)

    return forward


def _moe(original: Any) -> Any:
    from ._prefill_chunk import active

    def run(self: Any, hidden_states: Any, forward_batch: Any, **kwargs: Any) -> Any:
        chunk = active()
        if chunk is None:
            return original(self, hidden_states, forward_batch, **kwargs)
        ids = {name: kwargs[name] for name in ("input_ids", "input_ids_global")}
        return chunk.moe(original, self, hidden_states, forward_batch, ids)

    return run


def _bind_moe(original: Any) -> Any:
    from ._prefill_chunk import active

    def bind(self: Any, hidden_states: Any, batch: Any, call: Any, rows: Any, overlapped_rows: Any) -> Any:
        chunk = active()
        if chunk is None:
            return original(self, hidden_states, batch, call, rows, overlapped_rows)
        from ._prefill_transport import moe_transport

        return moe_transport()(chunk, self, hidden_states, batch, call, rows)

    return bind


def _engram(original: Any) -> Any:
    from ._prefill_chunk import active

    def forward(self: Any, x: Any, hash_ids: Any, forward_batch: Any = None, **kwargs: Any) -> Any:
        chunk = active()
        if chunk is None:
            return original(self, x, hash_ids, forward_batch, **kwargs)
        return chunk.engram(original, self, x, hash_ids, forward_batch, kwargs)

    return forward


def _tail_rows(original: Any) -> Any:
    from ._prefill_chunk import current

    def rows(self: Any, t: Any) -> Any:
        chunk = current()
        return original(self, t) if chunk is None else chunk.tail_rows(original, self, t)

    return rows


def _enter_tail(original: Any) -> Any:
    from ._prefill_chunk import active

    def enter_late_layer_tail(self: Any, forward_batch: Any) -> Any:
        chunk = active()
        if chunk is not None:
            chunk.leave()
        return original(self, forward_batch)

    return enter_late_layer_tail


def _source_kv(original: Any) -> Any:
    from ._prefill_chunk import active

    def write_tail_source_kv(self: Any, *, layer: Any, x: Any, positions: Any, forward_batch: Any) -> None:
        chunk = active()
        if chunk is None:
            return original(self, layer=layer, x=x, positions=positions, forward_batch=forward_batch)
        full = chunk.tail_source(x)
        with chunk.whole():
            return original(self, layer=layer, x=full, positions=positions, forward_batch=forward_batch)

    return write_tail_source_kv


def _slot(original: Any) -> Any:
    from ._prefill_chunk import active

    def slot(self: Any, like: Any) -> Any:
        chunk = active()
        return original(self, like) if chunk is None else chunk.slot(original, self, like)

    return slot


def _stream_mean(original: Any) -> Any:
    from ._prefill_chunk import active

    def mhc_stream_mean(x: Any, out: Any = None) -> Any:
        chunk = active()
        return original(x, out) if chunk is None else chunk.stream_mean(original, x, out)

    return mhc_stream_mean


def _stats_stream(original: Any) -> Any:
    """0.5.21 sums inside attention and MoE when it computes statistics beside them: not while the sum is ours."""
    from ._prefill_chunk import active

    def get_hc_stats_stream(self: Any, hidden_states: Any, forward_batch: Any) -> Any:
        return original(self, hidden_states, forward_batch) if active() is None else None

    return get_hc_stats_stream


_WRAPPERS = {
    "forward": lambda original: (_engram if original.__qualname__.startswith("Engram.") else _attention)(original),
    "_run_moe_ffn_dp_sync": _moe,
    "_bind_moe_transport": _bind_moe,
    "rows": _tail_rows,
    "enter_late_layer_tail": _enter_tail,
    "write_tail_source_kv": _source_kv,
    "slot": _slot,
    "mhc_stream_mean": _stream_mean,
    "_get_hc_stats_stream": _stats_stream,
}
