"""The kernel of hc_fused.py: one program takes a run of rows through all of K.

The bits hang on the shape of the arithmetic: a tile's dot is added to the slice's accumulator (which Triton makes the
dot's own accumulator), a slice's accumulator to the total, which starts at +0. Masks, load layouts and the number of
warps are those of the split form, so that the row sum of squares is reduced in the same tree.
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
    x, w, rows, columns, first, mask_m, mask_n, x_stride, w_stride, last,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    k = first + tl.arange(0, BLOCK_K)
    mask_k = k < last
    x_tile = tl.load(x + rows[:, None] * x_stride + k[None, :], mask=mask_m[:, None] & mask_k[None, :], other=0.0)
    w_tile = tl.load(w + columns[None, :] * w_stride + k[:, None], mask=mask_n[None, :] & mask_k[:, None], other=0.0)
    return x_tile.to(tl.float32), w_tile.to(tl.float32)


@triton.jit
def _mix_sums(
    x, w, mix, sq, M, K, x_stride, w_stride,
    N: tl.constexpr, N_PAD: tl.constexpr, SLICES: tl.constexpr, TILES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, N_PAD)
    mask_m = rows < M
    mask_n = columns < N
    total = tl.zeros([BLOCK_M, N_PAD], dtype=tl.float32)
    total_sq = tl.zeros([BLOCK_M], dtype=tl.float32)
    if FLAT:
        acc = tl.zeros([BLOCK_M, N_PAD], dtype=tl.float32)
        part = tl.zeros([BLOCK_M], dtype=tl.float32)
        for tile in range(SLICES * TILES):
            x_tile, w_tile = _tile(x, w, rows, columns, tile * BLOCK_K, mask_m, mask_n, x_stride, w_stride, K, BLOCK_K)
            acc += tl.dot(x_tile, w_tile, input_precision=PRECISION)
            part += tl.sum(x_tile * x_tile, axis=1)
            ends = tile % TILES == TILES - 1
            total = tl.where(ends, total + acc, total)
            total_sq = tl.where(ends, total_sq + part, total_sq)
            acc = tl.where(ends, 0.0, acc)
            part = tl.where(ends, 0.0, part)
    else:
        for slice_ in range(SLICES):
            acc = tl.zeros([BLOCK_M, N_PAD], dtype=tl.float32)
            part = tl.zeros([BLOCK_M], dtype=tl.float32)
            start = slice_ * (TILES * BLOCK_K)
            for at in range(0, TILES * BLOCK_K, BLOCK_K):
                x_tile, w_tile = _tile(
                    x, w, rows, columns, start + at, mask_m, mask_n, x_stride, w_stride,
                    start + TILES * BLOCK_K, BLOCK_K,
                )  # fmt: skip
                acc += tl.dot(x_tile, w_tile, input_precision=PRECISION)
                part += tl.sum(x_tile * x_tile, axis=1)
            total += acc
            total_sq += part
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
        _mix_sums[(triton.cdiv(rows, plan.block_m),)](
            x, weight, mix, sq, rows, k, x.stride(0), weight.stride(0),
            N=n, N_PAD=max(16, triton.next_power_of_2(n)), SLICES=slices, TILES=k // (slices * block_k),
            BLOCK_M=plan.block_m, BLOCK_K=block_k, PRECISION=precision, FLAT=plan.flat,
            num_warps=_NUM_WARPS, num_stages=plan.num_stages,
        )  # fmt: skip
    return mix, sq
