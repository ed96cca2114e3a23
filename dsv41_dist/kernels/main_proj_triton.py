"""The kernels of main_proj.py: partial sums of tiles of 64 columns over chunks of k, then their sum in order.

Rows are padded to the 16 of a tensor core tile, and the number of rows is no compile-time constant: one binary, so a
row's bits do not depend on it. The operand of the dot comes from an 8-bit load, which lets Triton permute k inside the
instruction; the permutation is a constant of the binary too.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from .main_proj import GROUP, MAX_ROWS, TILE_N, chunks_of

if TYPE_CHECKING:
    from .main_proj import Twin

__all__ = ["launch"]

_UNROLL = 4
_TILE_SUM = 256
# The interpreter's dot has no bf16; float32 holds both operands exactly.
_WIDE_DOT = os.environ.get("TRITON_INTERPRET") == "1"


@triton.jit(do_not_specialize=["rows"])
def _partial(
    x, codes, exponents, partial, rows, n, groups, each,
    GROUP: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, UNROLL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    chunk = tl.program_id(1)
    row = tl.arange(0, ROWS)
    inner = tl.arange(0, GROUP)
    here = column < n
    live = row < rows
    k = groups * GROUP
    first = chunk * each
    last = tl.minimum(first + each, groups)
    total = tl.zeros((ROWS, TILE), tl.float32)
    for start in range(first, last, UNROLL):
        for step in tl.static_range(UNROLL):
            group = start + step
            at_k = group * GROUP + inner
            deep = at_k < last * GROUP
            a = tl.load(x + row[:, None] * k + at_k[None, :], mask=live[:, None] & deep[None, :], other=0.0)
            at = (group * n + column)[:, None] * GROUP + inner[None, :]
            w = tl.load(codes + at, mask=here[:, None] & deep[None, :], other=0.0)
            e = tl.load(exponents + group * n + column, mask=here & (column * 0 + group < last), other=127)
            scale = (e.to(tl.int32) << 23).to(tl.float32, bitcast=True)
            if WIDE:
                product = tl.dot(a.to(tl.float32), tl.trans(w.to(tl.float32)), input_precision="ieee")
            else:
                product = tl.dot(a, tl.trans(w.to(tl.bfloat16)))
            total += product * scale[None, :]
    to = (chunk * rows + row)[:, None] * n + column[None, :]
    tl.store(partial + to, total, mask=live[:, None] & here[None, :])


@triton.jit(do_not_specialize=["rows"])
def _add(partial, out, rows, n, chunks, TILE: tl.constexpr):
    row = tl.program_id(0)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    here = column < n
    total = tl.zeros((TILE,), tl.float32)
    for chunk in range(chunks):
        total += tl.load(partial + (chunk * rows + row) * n + column, mask=here, other=0.0)
    tl.store(out + row * n + column, total.to(tl.bfloat16), mask=here)


def launch(x: torch.Tensor, twin: Twin) -> torch.Tensor:
    """See main_proj.main_proj, which has checked the arguments. x is contiguous."""
    groups, n, _ = twin.codes.shape
    rows = x.shape[0]
    chunks, each = chunks_of(n, groups)
    partial = torch.empty(chunks, rows, n, dtype=torch.float32, device=x.device)
    out = torch.empty(rows, n, dtype=torch.bfloat16, device=x.device)
    partial_kernel: Any = _partial
    add_kernel: Any = _add
    partial_kernel[(triton.cdiv(n, TILE_N), chunks)](
        x, twin.codes, twin.exponents, partial, rows, n, groups, each,
        GROUP=GROUP, ROWS=MAX_ROWS, TILE=TILE_N, UNROLL=_UNROLL, WIDE=_WIDE_DOT, num_warps=4, num_stages=4,
    )  # fmt: skip
    add_kernel[(rows, triton.cdiv(n, _TILE_SUM))](partial, out, rows, n, chunks, TILE=_TILE_SUM, num_warps=2)
    return out
