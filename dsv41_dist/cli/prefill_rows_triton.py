"""The kernels of prefill_rows.py. Every block's shape is a constant of the hidden size, never of the number of rows."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from .prefill_rows import Mixer

__all__ = ["launch_combine_norm", "launch_mix", "launch_post"]

# The interpreter's dot has no bf16; float32 holds both operands exactly.
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# No software pipeline: with more than one stage Triton 3.6 wgmma of 64-row tiles raced on an H200, and about 1 in 500
# sums differed from run to run. One stage did not in any run.
_STAGES = 1
_TILE, _PADDED, _ITERATIONS, _EPS = 64, 32, 20, 1e-6


@triton.jit
def _post(residual, y, po, co, out, hidden, S: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < hidden
    value = tl.load(y + row * hidden + column, mask=mask, other=0.0).to(tl.float32)
    base = row * S * hidden + column
    for s in tl.static_range(S):
        total = tl.load(po + row * S + s) * value
        for t in tl.static_range(S):
            # The same address for every s: read from memory once, then from the cache.
            stream = tl.load(residual + base + t * hidden, mask=mask, other=0.0).to(tl.float32)
            total += tl.load(co + row * S * S + t * S + s) * stream
        tl.store(out + base + s * hidden, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _combine_norm(residual, pre, weight, out, hidden, EPS: tl.constexpr, S: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < hidden
    total = tl.zeros((BLOCK,), tl.float32)
    for s in tl.static_range(S):
        stream = tl.load(residual + (row * S + s) * hidden + column, mask=mask, other=0.0).to(tl.float32)
        total += tl.load(pre + row * S + s) * stream
    scale = 1.0 / tl.sqrt(tl.sum(total * total, axis=0) / hidden + EPS)
    gain = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * hidden + column, (total * scale * gain).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _mix_parts(
    residual, parts, sums, squares, rows, k, slice_k,
    TILE: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One slice of K for one tile of rows: the products with the three bf16 summands of fn, and the squares."""
    tile = tl.program_id(0)
    part = tl.program_id(1)
    row = tile * TILE + tl.arange(0, TILE)
    out = tl.arange(0, PADDED)
    column = tl.arange(0, BLOCK)
    first = part * slice_k
    total = tl.zeros((TILE, PADDED), tl.float32)
    square = tl.zeros((TILE,), tl.float32)
    for at in range(0, slice_k, BLOCK):
        x = tl.load(residual + row[:, None].to(tl.int64) * k + first + at + column[None, :])
        for index in tl.static_range(3):
            fn = tl.load(parts + index * PADDED * k + out[None, :] * k + first + at + column[:, None])
            if WIDE:
                total = tl.dot(x.to(tl.float32), fn.to(tl.float32), total, input_precision="ieee")
            else:
                total = tl.dot(x, fn, total)
        wide = x.to(tl.float32)
        square += tl.sum(wide * wide, axis=1)
    tl.store(sums + (part * rows + row[:, None]) * PADDED + out[None, :], total)
    tl.store(squares + part * rows + row, square)


@triton.jit
def _mix_finish(
    sums, squares, scale, base, pre, po, co, rows, k,
    SLICES: tl.constexpr, TILE: tl.constexpr, PADDED: tl.constexpr, S: tl.constexpr,
    ITERATIONS: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    i = tl.arange(0, S)
    square = tl.zeros((TILE,), tl.float32)
    read = tl.zeros((TILE, S), tl.float32)
    write = tl.zeros((TILE, S), tl.float32)
    c = tl.zeros((TILE, S, S), tl.float32)
    at = i[None, :, None] * S + i[None, None, :]
    for part in tl.static_range(SLICES):
        line = (part * rows + row) * PADDED
        square += tl.load(squares + part * rows + row)
        read += tl.load(sums + line[:, None] + i[None, :])
        write += tl.load(sums + line[:, None] + S + i[None, :])
        c += tl.load(sums + line[:, None, None] + 2 * S + at)
    rms = 1.0 / tl.sqrt(square / k + EPS)
    read = read * rms[:, None] * tl.load(scale) + tl.load(base + i)[None, :]
    write = write * rms[:, None] * tl.load(scale + 1) + tl.load(base + S + i)[None, :]
    c = c * rms[:, None, None] * tl.load(scale + 2) + tl.load(base + 2 * S + at)
    tl.store(pre + row[:, None] * S + i[None, :], 1.0 / (1.0 + tl.exp(-read)) + EPS)
    tl.store(po + row[:, None] * S + i[None, :], 2.0 / (1.0 + tl.exp(-write)))
    c = tl.exp(c - tl.max(c, axis=2, keep_dims=True))
    c = c / tl.sum(c, axis=2, keep_dims=True) + EPS
    c = c / (tl.sum(c, axis=1, keep_dims=True) + EPS)
    for _ in range(ITERATIONS - 1):
        c = c / (tl.sum(c, axis=2, keep_dims=True) + EPS)
        c = c / (tl.sum(c, axis=1, keep_dims=True) + EPS)
    tl.store(co + row[:, None, None] * S * S + at, c)


def launch_post(residual: torch.Tensor, y: torch.Tensor, po: torch.Tensor, co: torch.Tensor) -> torch.Tensor:
    """See prefill_rows.post."""
    rows, streams, hidden = residual.shape
    out = torch.empty_like(residual)
    block = min(1024, triton.next_power_of_2(hidden))
    grid = (rows, triton.cdiv(hidden, block))
    _post[grid](residual, y, po, co, out, hidden, S=streams, BLOCK=block, num_warps=4)
    return out


def launch_combine_norm(residual: torch.Tensor, pre: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """See prefill_rows.combine_norm."""
    rows, streams, hidden = residual.shape
    out = torch.empty(rows, hidden, dtype=residual.dtype, device=residual.device)
    block = triton.next_power_of_2(hidden)
    _combine_norm[(rows,)](residual, pre, weight, out, hidden, EPS=_EPS, S=streams, BLOCK=block, num_warps=8)
    return out


def launch_mix(residual: torch.Tensor, mixer: Mixer) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See prefill_rows.mix. K is cut into 8 slices where that gives whole blocks, so that few rows fill the GPU too."""
    rows, streams, hidden = residual.shape
    k = streams * hidden
    block = 128 if k % 128 == 0 else 64
    slices = 8 if k % (8 * block) == 0 else 1
    floats = {"dtype": torch.float32, "device": residual.device}
    sums = torch.empty(slices, rows, _PADDED, **floats)
    squares = torch.empty(slices, rows, **floats)
    pre, po = torch.empty(rows, streams, **floats), torch.empty(rows, streams, **floats)
    co = torch.empty(rows, streams, streams, **floats)
    tiles = rows // _TILE
    _mix_parts[(tiles, slices)](
        residual, mixer.parts, sums, squares, rows, k, k // slices,
        TILE=_TILE, PADDED=_PADDED, BLOCK=block, WIDE=_INTERPRETED, num_warps=4, num_stages=_STAGES,
    )  # fmt: skip
    _mix_finish[(tiles,)](
        sums, squares, mixer.scale, mixer.base, pre, po, co, rows, k,
        SLICES=slices, TILE=_TILE, PADDED=_PADDED, S=streams, ITERATIONS=_ITERATIONS, EPS=_EPS, num_warps=1,
    )  # fmt: skip
    return pre, po, co
