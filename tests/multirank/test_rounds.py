"""10,000 random agreement rounds a group size, with faults mixed in: not one split decision.

The checker replays the ranks' logs: in every round all live ranks have the same outcome, and it is the one that follows
from what the ranks said. Prints what it tried; AGREEMENT_ROUNDS changes the number.
"""

import collections
import os
import random
from pathlib import Path

import pytest

from dsv41_dist.cli.spawn import RankSet

from . import targets

ROUNDS = int(os.environ.get("AGREEMENT_ROUNDS", "10000"))
SETS = 20


@pytest.mark.timeout(400)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_not_one_split_decision(size, tmp_path, capsys):
    tried = collections.Counter()
    per_set = ROUNDS // SETS
    for seed in range(SETS):
        folder = tmp_path / f"{size}-{seed}"
        folder.mkdir()
        # Every set but the last loses a rank in its last round, at a random moment of it.
        kill_at = per_set - 1 if seed < SETS - 1 else -1
        with RankSet(size, targets.rounds, (seed + 100 * size, per_set, str(folder), kill_at)) as ranks:
            live = [r for r in range(size) if kill_at < 0 or r != (seed + 100 * size) % size]
            results = ranks.wait(300, live)
        assert all(results[i].error is None for i in range(len(live))), [r.trace for r in results]
        tried += _check(folder, size, live, per_set, seed + 100 * size, kill_at)
        tried["ranks killed"] += kill_at >= 0
    with capsys.disabled():
        print(f"\n{size} ranks: {dict(sorted(tried.items()))}, split decisions: 0")
    assert tried["rounds"] == ROUNDS // SETS * SETS


def _check(folder: Path, size, live, per_set, seed, kill_at):
    tried = collections.Counter()
    logs = {rank: (folder / str(rank)).read_text().splitlines() for rank in live}
    for index in range(per_set):
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
