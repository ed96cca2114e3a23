"""How rows of a prefill selection are divided, and how much context a run of them is known to see."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dsv41_dist.adapters._prefill_rows import Contexts, plan_rows
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


REQUESTS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 60)), min_size=1, max_size=4)


@given(requests=REQUESTS, ratio=st.integers(1, 3), cuts=st.tuples(st.integers(0, 120), st.integers(0, 120)))
def test_the_longest_context_of_a_run_is_never_more_than_its_rows_see(requests, ratio, cuts):
    """A row of a request of `rows` rows at the end of `before` + `rows` tokens sees what is compressed up to it."""
    sees = [(before + row + 1) // ratio for rows, before in requests for row in range(rows)]
    contexts = Contexts([rows for rows, _ in requests], [(before + rows) // ratio for rows, before in requests])
    assert contexts.longest(slice(0, len(sees)), ratio) == max(sees, default=0)
    window = slice(*sorted(cuts))
    got, want = contexts.longest(window, ratio), max(sees[window], default=0)
    assert want - 1 <= got <= want
