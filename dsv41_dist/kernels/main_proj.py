"""A few rows through a weight that is kept as its exact fp8 twin: the projection of the draft.

The twin holds w[n, k] = q[n, k] 2^s[n, k // 32] with q in e4m3 and one exponent for 32 columns of a row (OCP MX v1.0),
and exists only where that is w, bit for bit. The product is taken with the bf16 activation:

    y[m, n] = sum over chunks of groups ( sum over groups g of ( sum_{k in g} x[m, k] q[n, k] ) 2^s[n, g] ),  fp32

in a fixed order, so that a row's bits depend neither on how many rows there are nor on their content, and are the same
on every rank with the same kind of device. On a GPU by Triton (main_proj_triton.py), elsewhere `main_proj_torch`.

Bytes moved: n k (1 + 1/32) + 2 m k + 2 m n, and 8 m n chunks for the partial sums. At n = 2560, k = 15360, m = 6
that is 41.5 MB: 8.6 us at 4.8 TB/s.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["GROUP", "MAX_ROWS", "Twin", "chunks_of", "exact_twin", "main_proj", "main_proj_torch", "weight_of"]

GROUP = 32
MAX_ROWS = 16
TILE_N = 64
_LARGEST = 448.0
_BIAS, _LOWEST, _HIGHEST = 127, -126, 127  # of 2^s as a normal float32
_PROGRAMS = 264  # two for each of 132 SMs; not read from the device, so that the order of the sum is a constant
_ROWS_AT_ONCE = 512


class Twin(NamedTuple):
    """codes: e4m3 [k / 32, n, 32], a group's rows contiguous; exponents: uint8 [k / 32, n], s + 127."""

    codes: torch.Tensor
    exponents: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.exponents.nbytes


def exact_twin(weight: torch.Tensor) -> Twin | None:
    """The twin of weight [n, k] (bf16, fp16 or fp32), or None where there is none with s from -126 to 127.

    The smallest s whose e4m3 does not overflow decides: a value on the grid of a larger s that fits this one is on its
    grid too, because e4m3 loses relative precision only towards 0.
    """
    n, k = weight.shape
    if weight.numel() >= 2**31:
        raise ValueError(f"weight is {tuple(weight.shape)}: allowed is less than 2^31 elements, the kernel's offsets")
    if k % GROUP:
        return None
    codes = torch.empty(k // GROUP, n, GROUP, dtype=torch.float8_e4m3fn, device=weight.device)
    exponents = torch.empty(k // GROUP, n, dtype=torch.uint8, device=weight.device)
    for at in range(0, n, _ROWS_AT_ONCE):
        rows = weight[at : at + _ROWS_AT_ONCE]
        wide = rows.double().view(-1, k // GROUP, GROUP)
        if not bool(wide.isfinite().all()):
            return None
        mantissa, exponent = torch.frexp(wide.abs().amax(-1))
        shift = (exponent - torch.where(mantissa <= _LARGEST / 512, 9, 8)).clamp(_LOWEST, _HIGHEST)
        scaled = torch.ldexp(wide, -shift[..., None])
        if bool((scaled.abs() > _LARGEST).any()):
            return None
        # By way of float32, which holds every value that e4m3 can: what is rounded twice is not exact anyway.
        quantized = scaled.float().to(torch.float8_e4m3fn)
        back = torch.ldexp(quantized.double(), shift[..., None]).to(weight.dtype).view(rows.shape)
        if not _same_bits(back, rows):
            return None
        codes[:, at : at + _ROWS_AT_ONCE] = quantized.transpose(0, 1)
        exponents[:, at : at + _ROWS_AT_ONCE] = (shift + _BIAS).to(torch.uint8).t()
    return Twin(codes, exponents)


def weight_of(twin: Twin, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """The weight that the twin stands for: [n, k]."""
    groups, n, _ = twin.codes.shape
    shift = twin.exponents.int() - _BIAS
    return torch.ldexp(twin.codes.double(), shift[..., None]).to(dtype).transpose(0, 1).reshape(n, groups * GROUP)


def chunks_of(n: int, groups: int) -> tuple[int, int]:
    """(chunks, groups in each but the last): how the sum over k is cut, from the shape of the weight alone."""
    wanted = max(1, min(_PROGRAMS // -(-n // TILE_N), -(-groups // 4)))
    each = -(-groups // wanted)
    return -(-groups // each), each


def main_proj(x: torch.Tensor, twin: Twin) -> torch.Tensor:
    """x [m, k] bf16, 1 <= m <= 16 -> [m, n] bf16. Graph-safe. Raises ValueError for what does not fit."""
    groups, _, _ = twin.codes.shape
    if x.dim() != 2 or not 1 <= x.shape[0] <= MAX_ROWS or x.shape[1] != groups * GROUP or x.dtype != torch.bfloat16:
        raise ValueError(f"x is {x.dtype} {tuple(x.shape)}: allowed is bfloat16 [1 to {MAX_ROWS}, {groups * GROUP}]")
    if x.is_cuda:
        from .main_proj_triton import launch

        return launch(x.contiguous(), twin)
    return main_proj_torch(x, twin)


def main_proj_torch(x: torch.Tensor, twin: Twin) -> torch.Tensor:
    """`main_proj` in plain torch: the twin of the kernel, with the same order of the sum but within a group."""
    groups, n, _ = twin.codes.shape
    chunks, each = chunks_of(n, groups)
    total = torch.zeros(x.shape[0], n, device=x.device)
    rows = x.float().view(-1, groups, GROUP)
    for chunk in range(chunks):
        part = torch.zeros_like(total)
        for g in range(chunk * each, min((chunk + 1) * each, groups)):
            scale = torch.exp2(twin.exponents[g].float() - _BIAS)
            product = (rows[:, g, None, :] * twin.codes[g].float()).sum(-1)
            part += product * scale
        total += part
    return total.to(torch.bfloat16)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    kind = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return bool(torch.equal(a.contiguous().view(kind), b.contiguous().view(kind)))
