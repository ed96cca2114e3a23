"""The rows of one prefill selection divided over the ranks and gathered: the runtime of spark_prefill_dense.

A selection is one or more int32 tensors [rows, n] whose rows do not depend on each other. `RowsOverRanks.run` computes
this rank's run of rows and gathers the rest, where everything that the ranks know in common allows it and where the
split has shown the stock selection; otherwise it says so, counted with the reason, and the caller goes the stock way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..comm import CannotSplit, SelfCheck, Split, same_bytes

if TYPE_CHECKING:
    from ..comm import Communicator
    from ..engine.state import AdapterState

__all__ = ["Contexts", "RowsOverRanks", "Selection", "plan_rows"]

Selection = tuple[torch.Tensor, ...]
Compute = Callable[[slice], Sequence[torch.Tensor]]

NAME = "spark_prefill_dense"


def plan_rows(rows: int, align: int, world: int) -> Split | CannotSplit:
    """Rows in tiles of `align`, a run of whole tiles per rank, the first ranks one tile more; the last tile may be
    short. The same value on every rank that passes the same arguments."""
    tiles = -(-rows // align)
    if tiles < world:
        return CannotSplit(f"{rows} rows", f"{tiles} tiles of {align} rows are fewer than {world} ranks")
    base, extra = divmod(tiles, world)
    sizes = [(base + (rank < extra)) * align for rank in range(world)]
    sizes[-1] -= tiles * align - rows
    return Split(rows, tuple(sizes))


class Contexts(NamedTuple):
    """The requests of a selection in the order of their rows, as every rank's host has them: query rows of each, and
    the compressed positions that its newest row sees."""

    rows: Sequence[int]
    positions: Sequence[int]

    def longest(self, window: slice, ratio: int) -> int:
        """The most positions that a row of `window` sees; of a row that is not its request's newest, at least."""
        longest = end = 0
        for rows, positions in zip(self.rows, self.positions, strict=False):
            start, end = end, end + rows
            last = min(end, window.stop)
            if last > max(start, window.start):
                longest = max(longest, positions - -(-(end - last) // ratio))
        return longest


class _Scope(threading.local):
    """What a layer's prefill selection has while it runs on this thread: index heads (else 0), picks a row, tokens a
    position."""

    heads: int = 0
    topk: int = 0
    ratio: int = 1


class RowsOverRanks:
    """One per process. Every decision follows from facts that the ranks have in common, or from a vote."""

    def __init__(self, comm: Communicator, state: AdapterState, min_rows: int) -> None:
        self.comm = comm
        self.state = state
        self.stock_calls: dict[str, int] = {}
        self._notes: dict[str, int] = {}  # reason -> where its line is in state.notes
        self._min_rows = min_rows
        self._check = SelfCheck(comm.agreement, NAME)
        self._scope = _Scope()

    @contextmanager
    def layer(self, heads: int, topk: int, ratio: int) -> Generator[None]:
        """While open, on this thread, the selections of one prefill layer are divided: that many index heads, picks a
        row, tokens a compressed position."""
        self._scope.heads, self._scope.topk, self._scope.ratio = heads, topk, ratio
        try:
            yield
        finally:
            self._scope.heads = 0

    @property
    def open(self) -> bool:
        return self._scope.heads > 0

    def stock(self, why: str) -> None:
        """Count a call that goes the stock way."""
        self.stock_calls[why] = self.stock_calls.get(why, 0) + 1
        line = f"stock: {why}: {self.stock_calls[why]} calls"
        if why in self._notes:
            self.state.notes[self._notes[why]] = line
        else:
            self._notes[why] = len(self.state.notes)
            self.state.notes.append(line)

    def run(self, kind: str, rows: int, compute: Compute, contexts: Contexts, blocks: int = 0) -> Selection | None:
        """The whole selection, or None when the caller must go the stock way (counted, except outside `layer`).

        `compute(window)` gives the selection of these rows: int32 tensors [window's rows, n], n the same for every
        window. blocks: positions in the blocks that a source publishes. Collective.
        """
        if not self.open:
            return None
        split = self._plan(rows)
        if isinstance(split, str):
            self.stock(split)
            return None
        ratio = self._scope.ratio
        longest = contexts.longest(slice(0, rows), ratio)
        # Up to top-k positions all are picked, and up to `blocks` all are published, whatever their scores are: what
        # was seen there says nothing of longer contexts.
        over = max((limit for limit in (self._scope.topk, blocks) if 0 < limit < longest), default=0)
        key = (kind, rows.bit_length(), over)
        verdict = self._check.verdict(key)
        if verdict is None:
            if any(contexts.longest(self._run_of(split, rank), ratio) <= over for rank in range(split.world) if over):
                self.stock(f"{kind}: undecided until every rank has a row that sees more than {over} positions")
                return None
            return self._decide(key, split, compute)
        if not verdict:
            self.stock(f"{_named(key)} did not give the stock selection")
            return None
        mine = compute(self._run_of(split, self.comm.ranks.rank))
        self.state.fire()
        return self._gather(kind, mine, split)

    def _plan(self, rows: int) -> Split | str:
        if rows < self._min_rows:
            return f"fewer than {self._min_rows} rows"
        # The scoring kernel works on 128 (row, head) pairs at a time.
        split = plan_rows(rows, max(1, 128 // self._scope.heads), self.comm.ranks.size)
        return split if isinstance(split, Split) else str(split)

    @staticmethod
    def _run_of(split: Split, rank: int) -> slice:
        return slice(split.start(rank), split.start(rank) + split.size(rank))

    def _gather(self, kind: str, mine: Sequence[torch.Tensor], split: Split) -> Selection:
        """One gather for all parts, which is a byte copy."""
        widths = [part.shape[1] for part in mine]
        sent = torch.cat(list(mine), dim=1) if len(mine) > 1 else mine[0].contiguous()
        whole = self.comm.all_gather_rows(sent, split, label=f"{NAME}:{kind}")
        return tuple(part.contiguous() for part in whole.split(widths, dim=1)) if len(widths) > 1 else (whole,)

    def _decide(self, key: tuple[str, int, int], split: Split, compute: Compute) -> Selection:
        """First call of a key: the stock selection, after the split one was held against it on every rank."""
        wanted: Selection = ()
        mine: Selection = ()
        failure: Exception | None = None
        try:
            wanted = tuple(compute(slice(0, split.n)))
            mine = tuple(compute(self._run_of(split, self.comm.ranks.rank)))
            if [part.shape[1:] for part in mine] != [part.shape[1:] for part in wanted]:
                raise ValueError(f"{[tuple(m.shape) for m in mine]} of {[tuple(w.shape) for w in wanted]}")
        except Exception as error:
            failure = error
        # A rank without its part would leave the others in the gather.
        got: Selection | None = None
        if self.comm.agreement.agree(failure is None, label=f"{NAME}:selected"):
            got = self._gather(key[0], mine, split)

        def stock() -> Selection:
            if failure is not None and not wanted:
                raise failure
            return wanted

        def divided() -> Selection:
            if failure is not None:
                raise failure
            # Not gathered: another rank failed, and its vote decides.
            return wanted if got is None or self._as_equal_as_stock(wanted, got, compute) else got

        self._check.run(key, stock, divided)
        if self._check.verdict(key):
            self.state.notes.append(f"{_named(key)}: {split.sizes} rows a rank, as stock")
        else:
            self.state.notes.append(f"{_named(key)}: stock, {self._check.reasons[key]}")
        return wanted

    def _as_equal_as_stock(self, wanted: Selection, got: Selection, compute: Compute) -> bool:
        """The stock bytes; or, where a second stock run does not give them either (a top-k may leave its picks in any
        order), the same picks in each row."""
        if same_bytes(wanted, got) is None:
            return True
        again = tuple(compute(slice(0, wanted[0].shape[0])))
        if same_bytes(wanted, again) is None:
            return False
        return same_bytes(_ordered(wanted), _ordered(got)) is None


def _named(key: tuple[str, int, int]) -> str:
    kind, bits, over = key
    return f"{kind} from {1 << bits - 1} rows, " + (f"over {over} positions" if over else "nothing to choose")


def _ordered(parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return tuple(part.sort(dim=1).values for part in parts)
