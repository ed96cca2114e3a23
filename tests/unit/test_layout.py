"""Splits cover, do not overlap, are monotone; what cannot be split says why."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv41_dist.comm import CannotSplit, LayoutError, RowSplit, Split, TileSplit


def test_the_split_of_a_1792_column_layer():
    split = TileSplit(n=1792, tile=128, world=4)
    assert split.tiles == (4, 4, 3, 3)
    assert split.sizes == (512, 512, 384, 384)
    assert split.starts == (0, 512, 1024, 1408)
    # Windows of 512 columns: the last one begins earlier, so that it stays inside the real columns.
    assert [split.window(rank) for rank in range(4)] == [(0, 0), (512, 0), (1024, 0), (1280, 128)]


@given(st.integers(1, 16), st.integers(1, 300), st.integers(1, 200))
def test_tile_splits_cover_in_order_without_overlap(world, tiles, tile):
    plan = TileSplit.plan(tiles * tile, tile, world)
    if tiles < world:
        assert isinstance(plan, CannotSplit)
        assert str(tiles) in plan.reason
        return
    assert isinstance(plan, TileSplit)
    _check_cover(plan)
    assert all(size % tile == 0 and size > 0 for size in plan.sizes)
    assert max(plan.tiles) - min(plan.tiles) <= 1
    assert list(plan.sizes) == sorted(plan.sizes, reverse=True)


@given(st.integers(1, 16), st.integers(1, 100), st.integers(1, 64))
def test_windows_lie_inside_and_contain_the_own_columns(world, tiles, tile):
    plan = TileSplit.plan(tiles * tile, tile, world)
    if not plan:
        return
    for rank in range(world):
        first, offset = plan.window(rank)
        assert first >= 0
        assert first + plan.widest <= plan.n
        assert first + offset == plan.start(rank)
        assert offset + plan.size(rank) <= plan.widest


@given(st.integers(0, 10_000), st.integers(1, 16))
def test_row_splits(rows, world):
    plan = RowSplit.plan(rows, world)
    assert bool(plan) == (rows % world == 0)
    if isinstance(plan, RowSplit):
        _check_cover(plan)
        assert plan.even
    uneven = RowSplit.uneven(rows, world)
    _check_cover(uneven)
    assert max(uneven.sizes) - min(uneven.sizes) <= 1


def _check_cover(split: Split) -> None:
    covered = [i for start, size in zip(split.starts, split.sizes, strict=True) for i in range(start, start + size)]
    assert covered == list(range(split.n))


@pytest.mark.parametrize(
    ("n", "tile", "world", "text"),
    [
        (1792, 100, 4, "1792 is not a multiple of the tile 100"),
        (256, 128, 4, "2 tiles are fewer than 4 ranks"),
        (0, 128, 4, "0 tiles are fewer than 4 ranks"),
    ],
)
def test_what_cannot_be_split_is_a_value_with_a_reason(n, tile, world, text):
    plan = TileSplit.plan(n, tile, world)
    assert isinstance(plan, CannotSplit)
    assert not plan
    assert plan == TileSplit.plan(n, tile, world)
    assert text in str(plan)
    with pytest.raises(LayoutError, match=text):
        TileSplit(n, tile, world)


def test_rows_that_do_not_divide():
    assert "10 is not a multiple of 4" in str(RowSplit.plan(10, 4))
    with pytest.raises(LayoutError, match="10 is not a multiple of 4"):
        RowSplit(10, 4)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: TileSplit(128, 0, 1), "tile=0"),
        (lambda: TileSplit(-128, 128, 1), "below 0"),
        (lambda: TileSplit(4096, 128, 17), "world=17"),
        (lambda: RowSplit(8, 0), "world=0"),
        (lambda: Split(5, (2, 2)), "add up to 4"),
        (lambda: Split(1, (2, -1)), "below 0"),
    ],
)
def test_bad_arguments_raise_and_name_the_value(call, text):
    with pytest.raises(LayoutError, match=text):
        call()
