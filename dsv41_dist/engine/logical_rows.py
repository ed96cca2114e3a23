"""How many rows a kernel choice must be made for, when a rank holds a shard of a prefill chunk.

Sequence parallelism hands a rank 1/world of a chunk's rows. A per-row kernel that picks its variant by the number of
rows (tile shape, slices of the sum, fused or not) would pick another one for the shard, and another order of the sum
means other bits. Code that makes such a choice asks here: `logical_rows(x.shape[0])` is the size of the whole chunk
while x is a shard of it, and x.shape[0] otherwise. Knows neither torch nor the engine.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager

__all__ = ["logical_rows", "sharded_rows", "whole_rows"]


class _Chunk(threading.local):
    shard: int = 0
    """Rows of the shard; 0 while no chunk is sharded on this thread."""
    rows: int = 0


_chunk = _Chunk()


def logical_rows(rows: int) -> int:
    """Rows to choose a kernel for, given a tensor of `rows` rows: the whole chunk's while `rows` is the shard's height
    inside `sharded_rows`, else `rows` itself (the gathered inputs of attention and MoE have the full height already).
    """
    return _chunk.rows if rows == _chunk.shard and rows else rows


@contextmanager
def sharded_rows(shard: int, rows: int) -> Generator[None]:
    """While open, on this thread, a tensor of `shard` rows stands for a chunk of `rows` rows. Not reentrant.

    Raises ValueError unless 1 <= shard <= rows and shard divides rows, and when a chunk is already open.
    """
    if not 1 <= shard <= rows or rows % shard:
        raise ValueError(f"sharded_rows: shard={shard}, rows={rows}: allowed is a shard of 1 to rows that divides rows")
    if _chunk.shard:
        raise ValueError(f"sharded_rows: a chunk of {_chunk.rows} rows is already open on this thread")
    _chunk.shard, _chunk.rows = shard, rows
    try:
        yield
    finally:
        _chunk.shard, _chunk.rows = 0, 0


@contextmanager
def whole_rows() -> Generator[None]:
    """While open, on this thread, every tensor stands for itself: inside attention and MoE, which take gathered rows
    and make tensors of other heights of them (a compressed key for every fourth row, say). May be nested.
    """
    saved = _chunk.shard, _chunk.rows
    _chunk.shard, _chunk.rows = 0, 0
    try:
        yield
    finally:
        _chunk.shard, _chunk.rows = saved
