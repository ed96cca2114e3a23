"""When a chunk is sharded: from facts that all ranks share, and from nothing else."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["FUSED_ROWS", "chunk_refusal", "is_prefill", "model_refusal"]

FUSED_ROWS = 384
"""Up to so many rows a GPU's stock path may fuse the sum, the update and a quantized input into one kernel."""


def model_refusal(runner: Any, model: Any) -> str | None:
    """Why no chunk of this model can be sharded, or None. Once, after the weights are loaded."""
    from sglang.srt.layers.moe import get_moe_a2a_backend  # pyright: ignore[reportMissingImports]
    from sglang.srt.runtime_context import get_parallel  # pyright: ignore[reportMissingImports]

    if model is None:
        return "the model has no DeepSeek-V4.1 layer loop"
    parallel = get_parallel()
    if parallel.tp_size < 2:
        return "the TP group has one rank"
    for name in ("attn_dp_size", "attn_cp_size", "moe_ep_size"):
        if getattr(parallel, name) != 1:
            return f"{name} is {getattr(parallel, name)}: a layer's sum is not one sum over the TP group"
    for name in ("attn_tp_size", "moe_tp_size"):
        if getattr(parallel, name) != parallel.tp_size:
            return f"{name} is {getattr(parallel, name)} of {parallel.tp_size} ranks"
    if model.pp_group.world_size != 1:
        return "pipeline parallel stages hand whole rows over"
    if not get_moe_a2a_backend().is_none():
        return "an all-to-all MoE backend moves rows itself"
    if not model.hc_pre_from_prev_sublayer:
        return "the model's hyper-connections are not those of V4.1"
    if torch.version.hip is not None:
        return "ROCm has fused boundaries of its own"
    args = runner.server_args
    if args.enable_lora or args.lora_paths:
        return "LoRA reads the rows of linear layers"
    return _mega_refusal(model)


def _mega_refusal(model: Any) -> str | None:
    """0.5.22 and 0.5.23 on datacenter Blackwell: one kernel makes the next sublayer's quantized input."""
    try:
        from sglang.srt.models import deepseek_v4_mhc as mhc  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None  # 0.5.21
    if mhc._can_use_mega_mhc(model.layers[model.start_layer].hc_cfg):
        return "SGLANG_OPT_DSV41_MEGA_MHC_PREFILL hands quantized shards over, whose scales cannot be gathered"
    return None


def is_prefill(batch: Any) -> bool:
    """Whether a forward is a prefill chunk of the target: not decode, verify, idle, a capture or a tuning run."""
    from sglang.srt.layers.logits_processor import (  # pyright: ignore[reportMissingImports]
        get_in_autotune_dummy_run,
    )
    from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.context import (  # pyright: ignore[reportMissingImports]
        is_in_breakable_cuda_graph,
    )
    from sglang.srt.model_executor.runner_utils.capture_mode import (  # pyright: ignore[reportMissingImports]
        get_is_capture_mode,
    )

    return (
        batch.forward_mode.is_extend_without_speculative()
        and not get_is_capture_mode()
        and not is_in_breakable_cuda_graph()
        and not get_in_autotune_dummy_run()
        and not torch.compiler.is_compiling()
        and not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())
    )


def chunk_refusal(x: torch.Tensor, input_ids: torch.Tensor | None, batch: Any, world: int, min_rows: int) -> str | None:
    """Why this prefill chunk is left to the stock path, or None. x: [rows, streams, hidden], the same on every rank."""
    from sglang.srt.runtime_context import get_forward  # pyright: ignore[reportMissingImports]

    rows = x.shape[0]
    if rows < min_rows:
        return f"fewer than {min_rows} rows"
    if x.is_cuda and rows <= FUSED_ROWS:
        return f"at most {FUSED_ROWS} rows, where stock may fuse the sum"
    if rows % world:
        return f"rows not a multiple of {world}"
    if input_ids is None or input_ids.shape[0] != rows:
        return "as many ids as rows are not there"
    if getattr(batch, "can_run_tbo", False):
        return "two-batch overlap"
    if get_forward().sp_active:
        return "the engine's own sequence parallelism"
    return None
