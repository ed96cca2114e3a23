"""The stand-ins on CUDA: only for what cannot be loaded there. The engine's own kernels run otherwise."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import absent
from .install import AfterImport, order_free, replace, replace_experts, replace_linear

__all__ = ["ABSENT", "DEVICE", "PACKAGES", "RANKS", "USED", "install", "write_absent"]

DEVICE = "REHEARSAL_DEVICE"
ABSENT = "REHEARSAL_ABSENT"  # names, separated by commas
RANKS = "REHEARSAL_RANKS"
USED = "stand_ins.json"  # written into the folder of the records: the names of those that are in use
# What the engine imports on CUDA without asking. Without the others it takes other kernels of its own.
REQUIRED = ("sgl_kernel", "deep_gemm")
PACKAGES = (*REQUIRED, "flashinfer", "tilelang", "torchvision")


def write_absent(folder: Path, missing: Sequence[str]) -> None:
    """Packages of one line for PYTHONPATH, in place of those of REQUIRED that are `missing`."""
    for name in missing:
        if name in REQUIRED:
            (folder / name).mkdir(parents=True, exist_ok=True)
            line = "from dsv41_dist.rehearsal.stand_ins.on_gpu import take_place\n\ntake_place(__name__)\n"
            (folder / name / "__init__.py").write_text(line)


def take_place(name: str) -> None:
    """The line of such a package: the functions of the forward path, and an error for every other one."""
    from . import row_kernels

    for function in (row_kernels.rmsnorm, row_kernels.fused_add_rmsnorm, row_kernels.silu_and_mul):
        absent.FUNCTIONS[f"sgl_kernel.{function.__name__}"] = function
    absent.FUNCTIONS["sgl_kernel.weak_ref_tensor"] = _same
    absent.become(name)


def _same(tensor: Any) -> Any:
    # The engine holds outputs of captured graphs weakly to save memory; a strong reference only costs memory.
    return tensor


def install() -> None:
    """Called once in every process of the engine, from its plugin entry point."""
    missing = [name for name in os.environ.get(ABSENT, "").split(",") if name]
    used = [name for name in REQUIRED if name in missing]
    after = AfterImport()
    if "flashinfer" in missing or order_free():
        used.append("mxfp4_experts")
        after.add("sglang.srt.layers.quantization.fp8", replace_experts)
    if "tilelang" in missing:
        used.append("sinkhorn")
        after.add("sglang.kernels.ops.layernorm.mhc", _sinkhorn)
    if {"flashinfer", "deep_gemm"} <= set(missing):
        used.append("deep_select")
        after.add("sglang.kernels.ops.attention.deep_select", _no_deep_select)
    if os.environ.get(RANKS) == "1":
        used.append("head_padding")
        after.add("sglang.srt.models.deepseek_v4", _pad_heads)
    if order_free():
        used.append("block_fp8_linear")
        after.add("sglang.srt.layers.quantization.fp8_utils", replace_linear)
    from ..recorder import RECORD, watch

    watch(after)
    after.place()
    folder = os.environ.get(RECORD)
    if folder:
        path = Path(folder, USED)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps({"used": used, "absent": missing}))
        temporary.replace(path)


def _no_deep_select(module: Any) -> None:
    def is_deep_select_supported() -> bool:
        return False

    replace(module, "is_deep_select_supported", is_deep_select_supported)


_HEADS = 64  # what FlashMLA's kernels take


def _pad_heads(module: Any) -> None:
    """On one rank the engine hands its query heads on as they are: the published model has 64, the tiny one four."""
    base = module.MqaAttentionBase
    count, sink = base._kernel_num_heads, base._local_attn_sink

    def _kernel_num_heads(self: Any, num_tokens: int) -> int:
        return max(count(self, num_tokens), _HEADS) if self.attn_tp_size == 1 else count(self, num_tokens)

    def _local_attn_sink(self: Any, kernel_num_heads: int | None = None) -> Any:
        if self.attn_tp_size > 1 or self.n_local_heads >= _HEADS:
            return sink(self, kernel_num_heads)
        if getattr(self, "_rehearsal_sink", None) is None:
            self._rehearsal_sink = self.attn_sink.data.new_zeros(_HEADS)
            self._rehearsal_sink[: self.n_local_heads] = self.attn_sink.data
        return self._rehearsal_sink

    replace(base, "_kernel_num_heads", _kernel_num_heads)
    replace(base, "_local_attn_sink", _local_attn_sink)


def _sinkhorn(module: Any) -> None:
    port = module._hc_split_sinkhorn_triton

    def hc_split_sinkhorn(*given: Any, **named: Any) -> Any:
        return port(*given, **named)

    replace(module, "hc_split_sinkhorn", hc_split_sinkhorn)
