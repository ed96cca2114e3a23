"""`RowsOverRanks` on every rank: a rank that fails before the gather, and input that can show no difference."""

import pytest
import torch

from dsv41_dist.adapters._prefill_rows import Contexts, RowsOverRanks
from dsv41_dist.engine.state import AdapterState

ROWS, TOPK = 512, 4
LONG, SHORT = Contexts([ROWS], [1000]), Contexts([ROWS], [TOPK])
FULL = torch.arange(ROWS * TOPK, dtype=torch.int32).view(ROWS, TOPK)


def made(comm):
    if comm.ranks.size == 1:
        pytest.skip("one rank divides nothing")
    return RowsOverRanks(comm, AdapterState("spark_prefill_dense", "bit-identical"), 1)


def run(rows, compute, contexts=LONG, blocks=0):
    with rows.layer(32, TOPK, 1):
        return rows.run("full_topk", ROWS, compute, contexts, blocks)


@pytest.mark.parametrize("whole", [True, False], ids=["stock", "slice"])
def test_a_rank_that_fails_leaves_no_other_in_the_gather(comm, whole):
    rows, last = made(comm), comm.ranks.size - 1

    def compute(window):
        if comm.ranks.rank == last and (window.stop - window.start == ROWS) == whole:
            raise MemoryError("no room")
        return (FULL[window],)

    if whole and comm.ranks.rank == last:
        with pytest.raises(MemoryError, match="no room"):
            run(rows, compute)
    else:
        assert torch.equal(run(rows, compute)[0], FULL)
        assert f"rank {last}: " in rows.state.notes[0]
        assert "MemoryError: no room" in rows.state.notes[0]
        assert run(rows, compute) is None
    assert comm.agreement.agree(True, label="after")


def test_short_contexts_decide_nothing_for_long_ones(comm):
    """On the last rank picks are wrong wherever there is a choice."""
    rows, last = made(comm), comm.ranks.size - 1

    def compute_of(contexts):
        def compute(window):
            wrong = contexts is LONG and comm.ranks.rank == last and window.stop - window.start < ROWS
            return (FULL[window] + wrong,)

        return compute

    for contexts, divided in ((SHORT, True), (LONG, False)):
        assert torch.equal(run(rows, compute_of(contexts), contexts)[0], FULL)
        assert (run(rows, compute_of(contexts), contexts) is not None) == divided
    assert rows.state.notes[0].startswith("full_topk from 512 rows, nothing to choose: ")
    assert rows.state.notes[1].startswith(f"full_topk from 512 rows, over {TOPK} positions: stock, rank 0: input 0")


def test_a_rank_whose_rows_show_nothing_leaves_the_key_undecided(comm):
    rows = made(comm)
    compute = lambda window: (FULL[window],)  # noqa: E731
    mixed = Contexts([16, ROWS - 16], [1000, TOPK])
    assert run(rows, compute, mixed) is None
    assert rows.stock_calls == {"full_topk: undecided until every rank has a row that sees more than 4 positions": 1}
    # A source's blocks are a choice of their own.
    assert torch.equal(run(rows, compute, Contexts([ROWS], [600]), blocks=700)[0], FULL)
    assert run(rows, compute, Contexts([256, 256], [1000, 600]), blocks=700) is None
    assert torch.equal(run(rows, compute, Contexts([ROWS], [2000]), blocks=700)[0], FULL)
    assert torch.equal(run(rows, compute, mixed)[0], FULL)
    undecided = "stock: full_topk: undecided until every rank has a row that sees more than {} positions: 1 calls"
    assert [note for note in rows.state.notes if note.startswith("stock")] == [undecided.format(n) for n in (4, 700)]
    assert [note.partition(":")[0] for note in rows.state.notes if note.endswith("as stock")] == [
        "full_topk from 512 rows, over 4 positions",
        "full_topk from 512 rows, over 700 positions",
    ]
