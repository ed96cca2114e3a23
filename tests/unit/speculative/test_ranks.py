"""Four gloo ranks: the same decisions without a broadcast; another seed on one rank is refused by name on all."""

from __future__ import annotations

from dsv41_dist.cli.spawn import RankSet
from tests.unit.speculative.rank_target import start_and_verify


def run(seeds):
    with RankSet(4, start_and_verify, (seeds,)) as ranks:
        results = ranks.wait(90, [0, 1, 2, 3])
    assert all(result.error is None for result in results), [result.trace for result in results]
    return [result.value for result in sorted(results, key=lambda result: result.rank)]


def test_ranks_with_one_seed_decide_the_same():
    values = run([11, 11, 11, 11])
    assert all(value == values[0] for value in values)
    assert values[0]["state"][1] == 5


def test_a_rank_with_another_seed_is_refused_by_name_before_the_first_step():
    values = run([11, 11, 12, 11])
    assert len({value["refused"] for value in values}) == 1
    text = values[0]["refused"]
    assert "do not agree at block_verify:noise" in text
    assert "random seed: ranks 0,1,3 said 11; rank 2 said 12" in text
    assert not any(value["noise"] for value in values)
