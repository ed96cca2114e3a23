"""How rows of a prefill selection are divided, and that nothing is without a layer open."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dsv41_dist.adapters._prefill_rows import plan_rows
from dsv41_dist.comm import CannotSplit


@given(rows=st.integers(0, 20_000), align=st.sampled_from([1, 2, 4, 8, 128]), world=st.integers(1, 16))
def test_runs_of_whole_tiles_as_even_as_tiles_allow(rows, align, world):
    split = plan_rows(rows, align, world)
    tiles = -(-rows // align)
    if tiles < world:
        assert isinstance(split, CannotSplit)
        assert str(split) == f"cannot split {rows} rows: {tiles} tiles of {align} rows are fewer than {world} ranks"
        return
    assert not isinstance(split, CannotSplit)
    assert split.n == sum(split.sizes) == rows
    assert split.world == world
    assert min(split.sizes) > 0
    assert all(size % align == 0 for size in split.sizes[:-1])
    assert max(-(-size // align) for size in split.sizes) - min(-(-size // align) for size in split.sizes) <= 1
