"""`RowScope` on every rank: three modes against reference.py, in sums whose every order gives the same bits and in
sums where it does not."""

import pytest
import torch

from dsv41_dist.comm import ArgumentError, CannotSplit, LayoutError, MismatchError, RowScope, reference
from dsv41_dist.comm.patterns import byte_pattern, reduce_expected, reduce_pattern, wrong_elements

MODES = ("exact", "fast", "comm")


def shards(comm, rows, shape, dtype=torch.float32, seed=3):
    return [reduce_pattern((rows, *shape), dtype, seed, rank) for rank in range(comm.ranks.size)]


@pytest.mark.parametrize("mode", MODES)
def test_take_and_gather_are_inverse(comm, mode):
    rows = 3 * comm.ranks.size
    full = byte_pattern((rows, 4, 5), torch.bfloat16, 1, 0)
    scope = RowScope(comm, rows, mode)
    mine = scope.take(full)
    assert mine.shape[0] == scope.held
    assert mine.data_ptr() == full[scope.start].data_ptr()
    assert wrong_elements(scope.gather(mine, label="rows"), full) == 0
    out = torch.empty_like(full)
    assert scope.gather(mine, out=out, label="rows") is out
    assert wrong_elements(out, full) == 0


@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_a_rank_holds_its_share(comm, mode):
    scope = RowScope(comm, 5 * comm.ranks.size, mode)
    assert (scope.held, scope.start) == (5, 5 * comm.ranks.rank)
    assert scope.sharded == (comm.ranks.size > 1)


def test_mode_comm_shards_nothing(comm):
    scope = RowScope(comm, 5 * comm.ranks.size, "comm")
    assert (scope.held, scope.start, scope.sharded) == (scope.rows, 0, False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_scatter_is_the_held_rows_of_the_sum(comm, mode, dtype):
    rows = 2 * comm.ranks.size
    parts = shards(comm, rows, (3,), dtype)
    scope = RowScope(comm, rows, mode)
    got = scope.scatter(parts[comm.ranks.rank].clone(), label="sum")
    want = reduce_expected((rows, 3), dtype, 3, comm.ranks.size, "sum")
    assert got.is_contiguous()
    assert wrong_elements(got, scope.take(want).contiguous()) == 0


def test_exact_gives_the_bits_of_the_all_reduce(comm):
    rows = 4 * comm.ranks.size
    generator = torch.Generator().manual_seed(comm.ranks.rank)
    part = torch.randn(rows, 7, generator=generator)
    scope = RowScope(comm, rows, "exact")
    want = comm.all_reduce(part, label="whole")
    assert wrong_elements(scope.scatter(part.clone(), label="sum"), scope.take(want).contiguous()) == 0


def test_exact_takes_the_sum_of_somebody_else(comm):
    rows = 2 * comm.ranks.size
    parts = shards(comm, rows, (3,))
    calls = []

    def theirs(x):
        calls.append(x.shape)
        return reference.all_reduce(parts) + 0.5

    scope = RowScope(comm, rows, "exact", all_reduce=theirs)
    got = scope.scatter(parts[comm.ranks.rank].clone(), label="sum")
    assert calls == [(rows, 3)]
    assert wrong_elements(got, scope.take(reference.all_reduce(parts) + 0.5).contiguous()) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_select_gives_the_bytes_of_those_rows(comm, mode, dtype):
    rows = 3 * comm.ranks.size
    full = byte_pattern((rows, 2, 3), dtype, 9, 0)
    scope = RowScope(comm, rows, mode)
    for chosen in ([rows - 1], [0, rows - 1, 1, 1], list(range(rows)), []):
        index = torch.tensor(chosen, dtype=torch.int64)
        got = scope.select(scope.take(full).clone(), index, label="pick")
        want = full.view(torch.uint8)[index].view(dtype) if chosen else full[:0]
        assert wrong_elements(got, want) == 0
    flat = torch.arange(rows)
    assert scope.select(scope.take(flat).clone(), flat[:2], label="pick").tolist() == [0, 1]
    with pytest.raises(LayoutError, match="select 'pick' on rank"):
        scope.select(full[:0], torch.tensor([0]), label="pick")


@pytest.mark.parametrize("mode", MODES)
def test_select_refuses_an_index_that_is_none_before_anything_moves(comm, mode):
    rows = 2 * comm.ranks.size
    scope = RowScope(comm, rows, mode)
    mine = scope.take(torch.ones(rows, 2))
    for index, said in (
        (torch.tensor([-1]), f"index: -1 to -1, allowed is 0 to {rows - 1}"),
        (torch.tensor([0, rows]), f"index: 0 to {rows}, allowed is 0 to {rows - 1}"),
        (torch.tensor([[1], [0]]), r"index: \(2, 1\) torch.int64, needed is \[n\] torch.int64"),
        (torch.ones(rows, dtype=torch.bool), f"index: \\({rows},\\) torch.bool, needed is"),
    ):
        with pytest.raises(ArgumentError, match=f"select 'pick' on rank {comm.ranks.rank} {said}"):
            scope.select(mine, index, label="pick")
    assert scope.select(mine[:, :0], torch.tensor([1, 0]), label="pick").shape == (2, 0)


@pytest.mark.parametrize("mode", MODES)
def test_gather_refuses_an_output_of_another_kind(comm, mode):
    rows = 2 * comm.ranks.size
    scope = RowScope(comm, rows, mode)
    mine = scope.take(torch.ones(rows, 1))
    for out in (torch.zeros(rows, 1, dtype=torch.int16), torch.zeros(rows, 5)):
        with pytest.raises(ArgumentError, match=r"needed is \(\d+, 1\) torch.float32"):
            scope.gather(mine, out=out, label="rows")


@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_scatter_keeps_no_rows_of_others_alive(comm, mode):
    rows = 2 * comm.ranks.size
    got = RowScope(comm, rows, mode).scatter(torch.ones(rows, 3), label="sum")
    assert got.untyped_storage().nbytes() == got.nbytes


def test_what_cannot_be_split_is_a_value_with_a_reason(comm):
    rows = comm.ranks.size + 1
    plan = RowScope.plan(comm, rows, "fast")
    if comm.ranks.size == 1:
        assert isinstance(plan, RowScope)
        return
    assert isinstance(plan, CannotSplit)
    assert "not a multiple" in str(plan)
    with pytest.raises(LayoutError, match="not a multiple"):
        RowScope(comm, rows, "fast")


def test_checked_mode_names_a_rank_in_another_mode(checked):
    size, rank = checked.ranks.size, checked.ranks.rank
    x = torch.ones(2 * size, 3)
    if size > 1:
        scope = RowScope(checked, 2 * size, "exact" if rank == size - 1 else "fast")
        with pytest.raises(MismatchError, match="all_reduce"):
            scope.scatter(x.clone(), label="sum")
    # The group is usable after the refusal.
    assert RowScope(checked, 2 * size, "fast").scatter(x.clone(), label="sum").tolist() == [[size] * 3] * 2


def test_wrong_heights_and_modes_are_named(comm):
    rows = 2 * comm.ranks.size
    scope = RowScope(comm, rows, "fast")
    for call in (
        lambda: scope.take(torch.zeros(rows + 1, 2)),
        lambda: scope.gather(torch.zeros(scope.held + 1, 2), label="rows"),
        lambda: scope.scatter(torch.zeros(rows + 1, 2), label="rows"),
        lambda: scope.scatter(torch.zeros(()), label="rows"),
    ):
        with pytest.raises(LayoutError, match=f"rank {comm.ranks.rank}.*needed are"):
            call()
    with pytest.raises(ArgumentError, match="mode='slow': allowed is exact, fast, comm"):
        RowScope(comm, rows, "slow")
