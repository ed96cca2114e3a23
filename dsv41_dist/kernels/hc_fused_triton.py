"""The kernels of hc_fused.py: one program takes a run of rows through all of K.

The bits hang on the shape of the arithmetic. A tile's dot is added to its slice's accumulator, a slice's accumulator to
the total, which starts at +0; the dot's own order is the tensor core instruction's. What is left is the order in which
a row's 64 squares are added, which in the split form follows from how the compiler lays out its loads. `_sums_as_split`
leaves the compiler the same choice; `_sums_in_vectors` has loads that are 16 bytes wide, and writes that order out.
Squares of bf16 are exact in fp32, so a fused multiply-add changes none of this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from .hc_fused import Plan

__all__ = ["launch"]

_NUM_WARPS = 4


@triton.jit
def _tile(
    x, w, rows, columns, first, last, mask_m, mask_n, x_stride, w_stride,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    k = first + tl.arange(0, BLOCK_K)
    mask_k = k < last
    x_tile = tl.load(x + rows[:, None] * x_stride + k[None, :], mask=mask_m[:, None] & mask_k[None, :], other=0.0)
    w_tile = tl.load(w + columns[None, :] * w_stride + k[:, None], mask=mask_n[None, :] & mask_k[:, None], other=0.0)
    return x_tile.to(tl.float32), w_tile.to(tl.float32)


@triton.jit
def _sums_as_split(
    x, w, mix, sq, M, K, x_stride, w_stride,
    N: tl.constexpr, N_PAD: tl.constexpr, SLICES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, N_PAD)
    mask_m = rows < M
    mask_n = columns < N
    total = tl.zeros([BLOCK_M, N_PAD], dtype=tl.float32)
    total_sq = tl.zeros([BLOCK_M], dtype=tl.float32)
    # Known at run time only, as in the split form: the compiler then lays out loads and row sums as it does there.
    per_slice = K // SLICES
    for at_slice in range(SLICES):
        start = at_slice * per_slice
        acc = tl.zeros([BLOCK_M, N_PAD], dtype=tl.float32)
        part = tl.zeros([BLOCK_M], dtype=tl.float32)
        for at in range(0, per_slice, BLOCK_K):
            x_tile, w_tile = _tile(
                x, w, rows, columns, start + at, start + per_slice, mask_m, mask_n, x_stride, w_stride, BLOCK_K
            )
            acc += tl.dot(x_tile, w_tile, input_precision=PRECISION)
            part += tl.sum(x_tile * x_tile, axis=1)
        total += acc
        total_sq += part
    tl.store(mix + rows[:, None] * N + columns[None, :], total, mask=mask_m[:, None] & mask_n[None, :])
    tl.store(sq + rows, total_sq, mask=mask_m)


@triton.jit
def _pairs(y, BLOCK_M: tl.constexpr, GROUPS: tl.constexpr, HALF: tl.constexpr):
    """[BLOCK_M, GROUPS, 2 HALF] -> [BLOCK_M, GROUPS, HALF]: each element and the one HALF further on. A sum of two, so
    its bits do not depend on the layout."""
    return tl.sum(tl.reshape(y, [BLOCK_M, GROUPS, 2, HALF]), axis=2)


@triton.jit
def _row_squares(x_tile, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """Sum of squares of each row in the tree that the split form's layout has: 32 neighbours by halves (a warp's
    butterfly), then the two halves of the tile (two warps)."""
    tl.static_assert(BLOCK_K == 64)
    y = tl.reshape(x_tile * x_tile, [BLOCK_M, 2, 32])
    y = _pairs(y, BLOCK_M, 2, 16)
    y = _pairs(y, BLOCK_M, 2, 8)
    y = _pairs(y, BLOCK_M, 2, 4)
    y = _pairs(y, BLOCK_M, 2, 2)
    y = _pairs(y, BLOCK_M, 2, 1)
    return tl.sum(tl.reshape(y, [BLOCK_M, 2]), axis=1)


@triton.jit
def _sums_in_vectors(
    x, w, mix, sq, M, K, x_stride, w_stride,
    N: tl.constexpr, N_PAD: tl.constexpr, SLICES: tl.constexpr, TILES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, N_PAD)
    mask_m = rows < M
    mask_n = columns < N
    total = tl.zeros([BLOCK_M, N_PAD], dtype=tl.float32)
    total_sq = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, N_PAD], dtype=tl.float32)
    part = tl.zeros([BLOCK_M], dtype=tl.float32)
    for tile in range(SLICES * TILES):
        x_tile, w_tile = _tile(
            x, w, rows, columns, tile * BLOCK_K, K, mask_m, mask_n, x_stride, w_stride, BLOCK_K
        )  # fmt: skip
        acc += tl.dot(x_tile, w_tile, input_precision=PRECISION)
        part += _row_squares(x_tile, BLOCK_M, BLOCK_K)
        ends = tile % TILES == TILES - 1
        total = tl.where(ends, total + acc, total)
        total_sq = tl.where(ends, total_sq + part, total_sq)
        acc = tl.where(ends, 0.0, acc)
        part = tl.where(ends, 0.0, part)
    tl.store(mix + rows[:, None] * N + columns[None, :], total, mask=mask_m[:, None] & mask_n[None, :])
    tl.store(sq + rows, total_sq, mask=mask_m)


def launch(
    x: torch.Tensor, weight: torch.Tensor, slices: int, block_k: int, precision: str, plan: Plan
) -> tuple[torch.Tensor, torch.Tensor]:
    """See hc_fused.mix_sums, which checks the arguments. Outputs are allocated here, so a call owns them."""
    rows, k = x.shape
    n = weight.shape[0]
    mix = torch.empty(rows, n, dtype=torch.float32, device=x.device)
    sq = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        kernel, tiles = (_sums_in_vectors, {"TILES": k // (slices * block_k)}) if plan.vectors else (_sums_as_split, {})
        kernel[(triton.cdiv(rows, plan.block_m),)](
            x, weight, mix, sq, rows, k, x.stride(0), weight.stride(0),
            N=n, N_PAD=max(16, triton.next_power_of_2(n)), SLICES=slices, **tiles,
            BLOCK_M=plan.block_m, BLOCK_K=block_k, PRECISION=precision,
            num_warps=_NUM_WARPS, num_stages=plan.num_stages,
        )  # fmt: skip
    return mix, sq
