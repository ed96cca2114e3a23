"""10,000 random agreement rounds a group size, with faults mixed in: not one split decision.

The checker replays the ranks' logs: in every round all live ranks have the same outcome, and it is the one that follows
from what the ranks said. Prints what it tried; AGREEMENT_ROUNDS changes the number.
"""

import collections
import contextlib
import os
import random
from pathlib import Path

import pytest

from dsv41_dist.cli.spawn import RankSet

from . import targets

ROUNDS = int(os.environ.get("AGREEMENT_ROUNDS", "10000"))
SETS = 20
PER_SET = ROUNDS // SETS
AT_ONCE = 4  # a round is mostly waiting for a wake-up; sets side by side use the cores, and disturb each other


@pytest.mark.timeout(400)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_not_one_split_decision(size, tmp_path, capsys):
    tried = collections.Counter()
    for first in range(0, SETS, AT_ONCE):
        sets = [_Set(size, seed, tmp_path / str(seed)) for seed in range(first, min(first + AT_ONCE, SETS))]
        with contextlib.ExitStack() as ends:
            started = [ends.enter_context(each.start()) for each in sets]
            for each, ranks in zip(sets, started, strict=True):
                results = ranks.wait(300, each.live)
                assert all(result.error is None for result in results), [r.trace for r in results]
        for each in sets:
            tried += _check(each)
            tried["ranks killed"] += each.kill_at >= 0
    with capsys.disabled():
        print(f"\n{size} ranks: {dict(sorted(tried.items()))}, split decisions: 0")
    assert tried["rounds"] == PER_SET * SETS


class _Set:
    """A rank set and its rounds. Every set but the last loses a rank in its last round, at a random moment."""

    def __init__(self, size: int, number: int, folder: Path):
        self.size, self.folder, self.seed = size, folder, number + 100 * size
        self.kill_at = PER_SET - 1 if number < SETS - 1 else -1
        self.live = [rank for rank in range(size) if self.kill_at < 0 or rank != self.seed % size]

    def start(self) -> RankSet:
        self.folder.mkdir()
        return RankSet(self.size, targets.rounds, (self.seed, PER_SET, str(self.folder), self.kill_at))


def _check(done: _Set):
    size, seed, kill_at = done.size, done.seed, done.kill_at
    tried = collections.Counter()
    logs = {rank: (done.folder / str(rank)).read_text().splitlines() for rank in done.live}
    for index in range(PER_SET):
        said = {rank: log[index] if index < len(log) else "nothing" for rank, log in logs.items()}
        if index == kill_at:
            # Which ranks an error can still quote depends on when the rank was lost; what happened must not.
            said = {rank: entry.partition("Error:")[0] for rank, entry in said.items()}
        assert len(set(said.values())) == 1, f"seed {seed} round {index}: {said}"
        number, kind, outcome = next(iter(said.values())).split(" ", 2)
        assert int(number) == index
        if index == kill_at:
            lost = seed % size
            expected = _expected(kind, size, seed, index).partition("Error:")[0]
            assert outcome in (f"RankTimeout [{lost}]", expected)
            tried["kill: all raised" if "RankTimeout" in outcome else "kill: all decided"] += 1
        else:
            assert outcome == _expected(kind, size, seed, index), f"seed {seed} round {index}"
        tried["rounds"] += 1
        tried[kind] += 1
    return tried


def _expected(kind, size, seed, index):
    """What a single process computes from the plan of the round."""
    plan = random.Random(seed * 1_000_003 + index)
    plan.choices(targets.KINDS, targets.WEIGHTS)
    odd, flags = plan.randrange(size), [plan.random() < 0.8 for _ in range(size)]
    everyone = list(range(size))
    if kind == "min":
        return str(index * 7 + min((rank + odd) % size for rank in everyone))
    if kind == "same":
        return f"[{index}, False]" if flags[0] else f"DisagreementError:{everyone}"
    if kind == "invalid":
        return f"DisagreementError:{[odd]}"
    if kind == "mixed":
        return f"MismatchError:{everyone}"
    return "False" if kind == "carried" else str(all(flags))
