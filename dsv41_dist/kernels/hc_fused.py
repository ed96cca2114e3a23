"""Hyper-connection mix statistics of many rows in one pass over K.

For x [M, K] and the mixing weight w [N, K] (N = (2 + h) h for h residual streams: 24 for 4) the engine needs, in fp32,

    mix[m, n] = sum_k x[m, k] w[n, k]        sq[m] = sum_k x[m, k]^2

as a sum over S slices of K, each slice a sum over tiles of 64 columns. Its kernels split K over programs, write the S
partial results and add them in a second kernel. With enough rows to fill the device there is nothing to split for: here
one program walks all slices of its rows and adds each slice's sum to the total as it is made, so that every partial sum
and every addition is that of the engine, in the engine's order: the same bits.

Bytes moved: 2 M K + 4 N K + 4 M (N + 1). The two-kernel form adds 8 S M (N + 1), written and read: at M = 8192,
K = 20480, S = 80 that is 131 MB on top of 338 MB (70 us at 4.8 TB/s, 1.2 ms at 273 GB/s).
On a GPU by Triton (hc_fused_triton.py); `mix_sums_torch` says what it means.
Source: mHC, arXiv 2512.24880; the published adapter of the same name.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["MAX_ROWS", "PLANS", "Plan", "mix_sums", "mix_sums_torch"]

MAX_ROWS = 65536  # row offsets are 32-bit in the kernel: 65536 x 20480 < 2^31


class Plan(NamedTuple):
    """How the pass is run. Rows per program stay below 64, from where Triton lowers tf32x3 to another instruction.
    `vectors`: wide loads and one loop over all tiles, with the order of the row sums written out for 64 columns and
    bf16; otherwise the loops of the split form, whose bits it has whatever the compiler makes of them."""

    block_m: int
    num_stages: int
    vectors: bool

    def __str__(self) -> str:
        return f"{self.block_m} rows, {self.num_stages} stages{', wide loads' if self.vectors else ''}"


PLANS = (Plan(16, 1, False), Plan(32, 1, False), Plan(16, 3, True), Plan(32, 3, True), Plan(32, 4, True))


def mix_sums(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    slices: int,
    block_k: int = 64,
    precision: str = "tf32x3",
    plan: Plan = PLANS[0],
) -> tuple[torch.Tensor, torch.Tensor]:
    """(mix [M, N], sq [M]), fp32, of x [M, K] (bf16, fp16 or fp32; rows contiguous) and weight [N, K] (fp32).

    `precision` is Triton's input_precision of the dot. Raises ValueError for shapes that the pass does not cover.
    """
    _check(x, weight, slices, block_k)
    from .hc_fused_triton import launch

    return launch(x, weight, slices, block_k, precision, plan)


def mix_sums_torch(
    x: torch.Tensor, weight: torch.Tensor, *, slices: int, block_k: int = 64
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same sums in the same order in plain torch: exact products, fp32 additions. Where every tile's sum is exact
    (integers, for example) it has the kernel's bits; elsewhere the order inside a tile is the device's."""
    _check(x, weight, slices, block_k)
    wide, per_slice = x.float(), x.shape[1] // slices
    mix = torch.zeros(x.shape[0], weight.shape[0], device=x.device)
    sq = torch.zeros(x.shape[0], device=x.device)
    for start in range(0, x.shape[1], per_slice):
        part, part_sq = torch.zeros_like(mix), torch.zeros_like(sq)
        for at in range(start, start + per_slice, block_k):
            tile = wide[:, at : at + block_k]
            part += tile @ weight[:, at : at + block_k].t()
            part_sq += tile.square().sum(1)
        mix += part
        sq += part_sq
    return mix, sq


def _check(x: torch.Tensor, weight: torch.Tensor, slices: int, block_k: int) -> None:
    rows, k = x.shape
    if weight.dim() != 2 or weight.shape[1] != k or weight.dtype != torch.float32:
        raise ValueError(f"weight is {weight.dtype} {tuple(weight.shape)}: allowed is float32 [N, {k}]")
    if slices < 1 or k % (slices * block_k):
        raise ValueError(f"slices={slices}, block_k={block_k}: allowed are those whose product divides K={k}")
    if rows > MAX_ROWS or rows * x.stride(0) >= 2**31:
        raise ValueError(f"x has {rows} rows {x.stride(0)} apart: allowed is up to {MAX_ROWS} and 2^31 elements")
    if x.stride(1) != 1 or weight.stride(1) != 1:
        raise ValueError(f"strides {x.stride()} and {weight.stride()}: allowed is 1 in the last dimension")
