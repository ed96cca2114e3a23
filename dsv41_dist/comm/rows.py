"""`RowScope`: the rows of one batch held in shards between the layers' cross-row operators (sequence parallelism).

A tensor-parallel layer ends in an all-reduce, after which every rank repeats the same row-local work on every row. The
same bytes moved as reduce-scatter and all-gather leave each rank with its own rows in between, so that the row-local
work is divided (Megatron-LM, arXiv 2205.05198):

    scope = RowScope.plan(comm, rows, "fast")
    if not scope: return stock(...)               # CannotSplit: equal on every rank, says why
    mine = scope.take(x)                          # [rows / world, ...], a view
    full = scope.gather(norm(mine), label="attn") # [rows, ...] for attention or MoE
    mine = scope.scatter(attention(full), label="attn")  # the summed own rows
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import torch

from .communicator import Communicator
from .errors import ArgumentError, LayoutError
from .layout import CannotSplit, RowSplit

__all__ = ["RowMode", "RowScope"]

RowMode = Literal["exact", "fast", "comm"]


class RowScope:
    """`rows` rows over the ranks of `comm`, in one of three modes.

    exact: the sum is an all-reduce of which each rank keeps its rows: the bits of the all-reduce, at its cost.
    fast: the sum is a reduce-scatter: the same bytes moved as the all-reduce together with the gather; reordered sum.
    comm: nothing is sharded (`take` and `gather` give back what they are given) and every sum is a reduce-scatter
        followed by an all-gather: shows what the collectives alone change.

    Args:
        comm: the group.
        rows: rows of the whole batch, the same on every rank.
        mode: one of the three, the same on every rank.
        all_reduce: sum over ranks of a tensor of any shape for `exact`, where its bits must be those of somebody
            else's all-reduce (an engine's); default is `comm.all_reduce`. It may overwrite what it is given.
    Raises ArgumentError for another mode, LayoutError where rows do not divide evenly.
    """

    def __init__(
        self,
        comm: Communicator,
        rows: int,
        mode: RowMode,
        *,
        all_reduce: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        if mode not in get_args(RowMode):
            raise ArgumentError(f"mode={mode!r}: allowed is {', '.join(get_args(RowMode))}")
        self.comm = comm
        self.mode: RowMode = mode
        self.split = RowSplit(rows, comm.ranks.size)
        self._all_reduce = all_reduce

    @classmethod
    def plan(
        cls,
        comm: Communicator,
        rows: int,
        mode: RowMode,
        *,
        all_reduce: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> RowScope | CannotSplit:
        """The scope, or why there is none: the same on every rank that passes the same rows."""
        split = RowSplit.plan(rows, comm.ranks.size)
        return cls(comm, rows, mode, all_reduce=all_reduce) if split else split

    @property
    def rows(self) -> int:
        """Rows of the whole batch."""
        return self.split.n

    @property
    def sharded(self) -> bool:
        """Whether a rank holds its own rows only."""
        return self.mode != "comm" and self.comm.ranks.size > 1

    @property
    def held(self) -> int:
        """Rows this rank holds between the cross-row operators."""
        return self.split.size(self.comm.ranks.rank) if self.sharded else self.rows

    @property
    def start(self) -> int:
        """First of the rows this rank holds."""
        return self.split.start(self.comm.ranks.rank) if self.sharded else 0

    def take(self, full: torch.Tensor) -> torch.Tensor:
        """The held rows of full [rows, ...], as a view [held, ...]. Any dtype."""
        self._check("take", full, self.rows)
        return full.narrow(0, self.start, self.held)

    def gather(self, held: torch.Tensor, *, out: torch.Tensor | None = None, label: str) -> torch.Tensor:
        """[held, ...] per rank -> [rows, ...] on every rank. Any dtype; a byte copy (bit-identical).

        Where nothing is sharded: `held` itself, or `out` with its bytes.
        """
        self._check(f"gather {label!r}", held, self.held)
        if self.sharded:
            return self.comm.all_gather(held, 0, out=out, label=label)
        if out is None:
            return held
        if out.shape != held.shape or out.dtype != held.dtype:
            raise ArgumentError(
                f"gather {label!r} on rank {self.comm.ranks.rank} out: {tuple(out.shape)} {out.dtype}, needed is"
                f" {tuple(held.shape)} {held.dtype}"
            )
        return out.copy_(held)

    def scatter(self, partial: torch.Tensor, *, label: str) -> torch.Tensor:
        """The held rows of the sum over ranks: [rows, ...] per rank -> [held, ...], contiguous, without keeping the
        others alive.

        Dtypes of `Communicator.all_reduce`. `partial` may be overwritten in mode exact.
        """
        self._check(f"scatter {label!r}", partial, self.rows)
        if self.mode == "exact":
            whole = self._all_reduce(partial) if self._all_reduce else self.comm.all_reduce(partial, label=label)
            mine = self.take(whole)
            return mine.clone(memory_format=torch.contiguous_format) if self.sharded else mine.contiguous()
        mine = self.comm.reduce_scatter(partial, label=label)
        return self.comm.all_gather(mine, 0, label=label) if self.mode == "comm" else mine

    def select(self, held: torch.Tensor, index: torch.Tensor, *, label: str) -> torch.Tensor:
        """Rows `index` (int64 [n], of the whole batch, the same on every rank) of what the ranks hold: [held, ...] per
        rank -> [n, ...] on every rank. Any dtype; a byte copy (bit-identical), without moving the other rows.

        Each row has one owner; the others add zero bytes, so the sum of bytes is the owner's row. 0 <= index < rows;
        unchecked on CUDA, where reading the index would make the host wait.
        """
        self._check(f"select {label!r}", held, self.held)
        if index.dim() != 1 or index.dtype != torch.int64:
            raise ArgumentError(
                f"select {label!r} on rank {self.comm.ranks.rank} index: {tuple(index.shape)} {index.dtype}, needed is"
                f" [n] {torch.int64}"
            )
        if index.is_cpu and len(index) and not 0 <= int(index.min()) <= int(index.max()) < self.rows:
            raise ArgumentError(
                f"select {label!r} on rank {self.comm.ranks.rank} index: {int(index.min())} to {int(index.max())},"
                f" allowed is 0 to {self.rows - 1}"
            )
        if not self.sharded:
            return held[index]
        local = index - self.start
        mine = (local >= 0) & (local < self.held)
        picked = held[local.clamp(0, self.held - 1)].contiguous()
        if picked.nbytes == 0:
            return picked
        as_bytes = picked.view(len(index), picked.shape[1:].numel()).view(torch.uint8)
        as_bytes.mul_(mine.unsqueeze(-1))
        return self.comm.all_reduce(as_bytes, label=label).view(picked.dtype).view(picked.shape)

    def _check(self, what: str, x: torch.Tensor, rows: int) -> None:
        if x.dim() == 0 or x.shape[0] != rows:
            raise LayoutError(
                f"{what} on rank {self.comm.ranks.rank}: shape {tuple(x.shape)}, needed are {rows} rows"
                f" (mode {self.mode}, {self.rows} rows over {self.split.world} ranks)"
            )
