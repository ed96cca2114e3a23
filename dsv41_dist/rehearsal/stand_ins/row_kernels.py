"""Row-wise kernels that stand in for sgl_kernel's on a GPU: one program a row, so that no row depends on the others."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .formulas import silu_mul_clamp

__all__ = ["fused_add_rmsnorm", "rmsnorm", "silu_and_mul"]


@triton.jit
def _norm(x, residual, weight, out, n, eps, ADD: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * n
    at = tl.arange(0, BLOCK)
    live = at < n
    value = tl.load(x + row + at, mask=live, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + row + at, mask=live, other=0.0).to(tl.float32)
        tl.store(residual + row + at, value.to(residual.dtype.element_ty), mask=live)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / n + eps)
    gain = tl.load(weight + at, mask=live, other=0.0).to(tl.float32)
    tl.store(out + row + at, (value * scale * gain).to(out.dtype.element_ty), mask=live)


def _launch(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, eps: float, add: bool
) -> None:
    # The kernel knows the width of x and no strides: it would write beside any other tensor's rows.
    given = {"x": x, "residual": residual, "out": out, "weight": weight}
    fits = residual.shape == out.shape == x.shape and weight.shape == x.shape[1:]
    if x.dim() != 2 or not fits or not all(tensor.is_contiguous() for tensor in given.values()):
        said = ", ".join(f"{name} {tuple(tensor.shape)} strides {tensor.stride()}" for name, tensor in given.items())
        raise NotImplementedError(f"norm stand-in: {said}; allowed is contiguous: weight [n], the others [m, n]")
    rows, n = x.shape
    if rows:
        _norm[(rows,)](x, residual, weight, out, n, eps, ADD=add, BLOCK=triton.next_power_of_2(n))


def rmsnorm(
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    enable_pdl: Any = None,
) -> torch.Tensor:
    """sgl_kernel.rmsnorm: input [m, n] / rms(input) * weight [n], in fp32, rounded once to input's dtype."""
    input = input.contiguous()
    out = torch.empty_like(input) if out is None else out
    _launch(input, input, weight, out, eps, False)
    return out


def fused_add_rmsnorm(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, enable_pdl: Any = None
) -> None:
    """sgl_kernel.fused_add_rmsnorm, in place: residual += input; input = rmsnorm of that sum in fp32. Both [m, n]."""
    _launch(input, residual, weight, input, eps, True)


def silu_and_mul(input: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """sgl_kernel.silu_and_mul: [m, 2 n] -> [m, n], silu of the first half times the second, in fp32."""
    value = silu_mul_clamp(input, None).to(input.dtype)
    return value if out is None else out.copy_(value)
