"""How rows and columns are divided over ranks: pure arithmetic, the same on every rank by construction.

`TileSplit` cuts n columns into tiles and gives each rank a run of whole tiles, the first ranks one more
(14 tiles of 128 over 4 ranks: 4/4/3/3). `RowSplit` cuts rows for sequence parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from .errors import LayoutError

__all__ = ["MAX_WORLD", "CannotSplit", "RowSplit", "Split", "TileSplit"]

MAX_WORLD = 16


@dataclass(frozen=True)
class CannotSplit:
    """Why a split does not exist. False as a condition, equal on every rank because it follows from the arguments."""

    what: str
    reason: str

    def __bool__(self) -> Literal[False]:
        return False

    def __str__(self) -> str:
        return f"cannot split {self.what}: {self.reason}"


@dataclass(frozen=True)
class Split:
    """n elements cut into one contiguous run per rank.

    Attributes:
        n: elements in all.
        sizes, starts: width and first element of each rank's run, in elements.
    """

    n: int
    sizes: tuple[int, ...]
    starts: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        starts: list[int] = []
        at = 0
        for size in self.sizes:
            if size < 0:
                raise LayoutError(f"sizes={self.sizes}: a size below 0")
            starts.append(at)
            at += size
        if at != self.n or not self.sizes:
            raise LayoutError(f"sizes={self.sizes}: they add up to {at}, not to n={self.n}")
        object.__setattr__(self, "starts", tuple(starts))

    @property
    def world(self) -> int:
        return len(self.sizes)

    @property
    def widest(self) -> int:
        return max(self.sizes)

    @property
    def even(self) -> bool:
        return len(set(self.sizes)) == 1

    def size(self, rank: int) -> int:
        return self.sizes[rank]

    def start(self, rank: int) -> int:
        return self.starts[rank]

    def window(self, rank: int) -> tuple[int, int]:
        """(first, offset): a window of the widest width that lies inside the n real elements and contains
        the rank's own run, which begins `offset` elements into it. Equal shapes on every rank, no padding."""
        first = min(self.starts[rank], self.n - self.widest)
        return first, self.starts[rank] - first


class TileSplit(Split):
    """n columns in tiles of `tile`, spread over `world` ranks in rank order, the first ranks one tile more.

    Raises LayoutError with the reason where the split does not exist; `TileSplit.plan` returns it as a value instead.
    Example: `TileSplit(n=1792, tile=128, world=4).sizes == (512, 512, 384, 384)`.
    """

    def __init__(self, n: int, tile: int, world: int) -> None:
        refusal = _tile_refusal(n, tile, world)
        if refusal is not None:
            raise LayoutError(str(refusal))
        base, extra = divmod(n // tile, world)
        super().__init__(n, tuple((base + (rank < extra)) * tile for rank in range(world)))
        object.__setattr__(self, "tile", tile)

    tile: int

    @property
    def tiles(self) -> tuple[int, ...]:
        return tuple(size // self.tile for size in self.sizes)

    @classmethod
    def plan(cls, n: int, tile: int, world: int) -> TileSplit | CannotSplit:
        """The split, or why there is none: the same value on every rank that passes the same arguments."""
        refusal = _tile_refusal(n, tile, world)
        return refusal if refusal is not None else cls(n, tile, world)


class RowSplit(Split):
    """`rows` in equal shards over `world` ranks (sequence parallelism, Megatron-LM, arXiv 2205.05198).

    Raises LayoutError where rows do not divide evenly; `RowSplit.plan` returns that as a value;
    `RowSplit.uneven` gives the first `rows % world` ranks one row more (for gathers).
    """

    def __init__(self, rows: int, world: int) -> None:
        refusal = _row_refusal(rows, world)
        if refusal is not None:
            raise LayoutError(str(refusal))
        super().__init__(rows, (rows // world,) * world)

    @classmethod
    def plan(cls, rows: int, world: int) -> RowSplit | CannotSplit:
        refusal = _row_refusal(rows, world)
        return refusal if refusal is not None else cls(rows, world)

    @staticmethod
    def uneven(rows: int, world: int) -> Split:
        _check_counts(f"{rows} rows", rows, world)
        base, extra = divmod(rows, world)
        return Split(rows, tuple(base + (rank < extra) for rank in range(world)))


def _check_counts(what: str, n: int, world: int) -> None:
    if n < 0:
        raise LayoutError(f"{what}: a count below 0")
    if not 1 <= world <= MAX_WORLD:
        raise LayoutError(f"world={world}: allowed is 1 to {MAX_WORLD}")


def _tile_refusal(n: int, tile: int, world: int) -> CannotSplit | None:
    _check_counts(f"{n} columns", n, world)
    if tile < 1:
        raise LayoutError(f"tile={tile}: allowed is 1 or more columns")
    what = f"{n} columns in tiles of {tile} over {world} ranks"
    if n % tile:
        return CannotSplit(what, f"{n} is not a multiple of the tile {tile}")
    if n // tile < world:
        return CannotSplit(what, f"{n // tile} tiles are fewer than {world} ranks")
    return None


def _row_refusal(rows: int, world: int) -> CannotSplit | None:
    _check_counts(f"{rows} rows", rows, world)
    if rows % world:
        return CannotSplit(f"{rows} rows over {world} ranks", f"{rows} is not a multiple of {world}")
    return None
