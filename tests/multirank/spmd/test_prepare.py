"""Calls declared before a capture: inside it every rank takes the declared route, or none does, also where the ranks'
shards have different shapes."""

from __future__ import annotations

import pytest
import torch

from dsv41_dist.comm import ArgumentError, Call, Communicator, Route, RouteTable, Split, TileSplit
from dsv41_dist.comm.transports.base import Transport


class Staged(Transport):
    """In the place of a transport that must be prepared; the base transport carries for it."""

    name = "roce"
    needs_prepare = True

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner.ranks, inner.watch)
        self.inner = inner
        self.prepared: list[Call] = []

    def prepare(self, calls) -> None:
        self.prepared += calls

    def all_reduce(self, x, op, out) -> None:
        self.inner.all_reduce(x, op, out)

    def all_gather_rows(self, x, out) -> None:
        self.inner.all_gather_rows(x, out)

    def all_gather_columns(self, x, split, out) -> None:
        self.inner.all_gather_columns(x, split, out)

    def reduce_scatter(self, x, op, out) -> None:
        self.inner.reduce_scatter(x, op, out)

    def broadcast(self, x, src) -> None:
        self.inner.broadcast(x, src)

    def barrier(self) -> None:
        self.inner.barrier()


class InCapture(Communicator):
    """Every call is one inside a graph capture."""

    @staticmethod
    def _capturing(x: torch.Tensor) -> bool:
        return True


@pytest.fixture
def staged(comm):
    base = comm.table.fallback
    routes = tuple(Route(op, None, "roce") for op in ("all_reduce", "all_gather", "all_gather_columns"))
    transports = {base: comm.transports[base], "roce": Staged(comm.transports[base])}
    return InCapture(
        comm.ranks, transports, RouteTable(base, routes), comm._watch, comm._control, comm.agreement
    )  # fmt: skip


def routes_of(comm, op, x, **facts) -> set[str]:
    """The route of this call on every rank."""
    return set(comm.agreement.gather(comm.route_name(op, x, **facts), label="routes"))


def uneven(world: int) -> TileSplit:
    return TileSplit((2 * world + 1) * 8, 8, world)  # the first rank has three tiles, the others two


@pytest.mark.parametrize("declared", ["the widest", "the narrowest", "the whole"])
def test_a_column_gather_is_declared_by_its_split_whatever_the_shard(staged, declared):
    split = uneven(staged.ranks.size)
    width = {"the widest": split.widest, "the narrowest": min(split.sizes), "the whole": split.n}[declared]
    mine = torch.full((6, split.size(staged.ranks.rank)), float(staged.ranks.rank), dtype=torch.bfloat16)
    facts = {"dim": 1, "split": split}
    base = staged.table.fallback
    assert routes_of(staged, "all_gather_columns", mine, **facts) == {base}
    staged.prepare([Call("all_gather_columns", (6, width), torch.bfloat16, -1, split=split)], label="prepare")
    assert [call.op for call in staged.transports["roce"].prepared] == ["all_gather_columns"]
    assert routes_of(staged, "all_gather_columns", mine, **facts) == {"roce"}
    got = staged.all_gather_columns(mine, split, label="columns")
    want = torch.cat([torch.full((6, size), float(r)) for r, size in enumerate(split.sizes)], 1).bfloat16()
    assert torch.equal(got, want)
    # Other rows, another type, another split: not declared, on any rank.
    assert routes_of(staged, "all_gather_columns", mine[:3], **facts) == {base}
    assert routes_of(staged, "all_gather_columns", mine.float(), **facts) == {base}
    other = Split(split.n, split.sizes[::-1])
    assert routes_of(staged, "all_gather_columns", mine, dim=1, split=other) == (
        {"roce"} if other.sizes == split.sizes else {base}
    )


def test_rows_are_gathered_on_the_declared_route_too(staged):
    heights = uneven(staged.ranks.size)
    scale = Split(heights.n * 4, tuple(size * 4 for size in heights.sizes))
    mine = torch.full((heights.size(staged.ranks.rank), 4), float(staged.ranks.rank))
    staged.prepare([Call("all_gather_columns", (heights.n, 4), torch.float32, 0, split=scale)], label="prepare")
    assert routes_of(staged, "all_gather_columns", mine, dim=0, split=scale) == {"roce"}
    got = staged.all_gather_rows(mine, heights, label="rows")
    assert torch.equal(got[:, 0], torch.cat([torch.full((s,), float(r)) for r, s in enumerate(heights.sizes)]))


def test_other_operations_are_declared_by_their_shape(staged):
    x = torch.ones(6, 16)
    base = staged.table.fallback
    staged.prepare([Call("all_reduce", (6, 16), torch.float32, reduce_op="sum")], label="prepare")
    assert routes_of(staged, "all_reduce", x, reduce_op="sum") == {"roce"}
    assert routes_of(staged, "all_reduce", x, reduce_op="max") == {base}
    assert routes_of(staged, "all_reduce", x[:3], reduce_op="sum") == {base}
    assert routes_of(staged, "all_gather", x, dim=1) == {base}
    staged.prepare([Call("all_gather", (6, 16), torch.float32, -1)], label="prepare")
    assert routes_of(staged, "all_gather", x, dim=1) == {"roce"}
    assert routes_of(staged, "all_gather", x, dim=0) == {base}


def test_a_column_gather_without_a_split_over_this_group_is_refused(staged):
    world = staged.ranks.size
    with pytest.raises(ArgumentError, match=f"no split: allowed is one over {world} ranks"):
        staged.prepare([Call("all_gather_columns", (6, 16), torch.float32, 1)], label="prepare")
    wider = Split(world + 1, (1,) * (world + 1))
    with pytest.raises(ArgumentError, match=rf"a split over {world + 1} ranks"):
        staged.prepare([Call("all_gather_columns", (6, 1), torch.float32, 1, split=wider)], label="prepare")
