"""The drill: a spare set of ranks loses one, and the ones that are left must say which."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from .spawn import RankSet

__all__ = ["run_drill"]

SIZE = 4
LOST = 2
BOUND_S = 3.0
_SIGNALS = {"stopped": signal.SIGSTOP, "killed": signal.SIGKILL}


def run_drill() -> list[dict[str, Any]]:
    """Stop rank 2 of 4, then kill rank 2 of 4; for each who named whom, after how long, and what was wrong."""
    return [_one(how) for how in _SIGNALS]


def _one(how: str) -> dict[str, Any]:
    left = [rank for rank in range(SIZE) if rank != LOST]
    with RankSet(SIZE, lose_a_rank, (how,)) as ranks:
        results = ranks.wait(BOUND_S + 30.0, left)
    said = {r.rank: r.value for r in results if r.value is not None}
    wrong = [f"rank {r.rank}: {r.error or 'no answer'}" for r in results if r.value is None]
    wrong += [f"rank {rank} named {value['missing']}" for rank, value in said.items() if value["missing"] != [LOST]]
    late = [f"rank {rank} only after {v['seconds']} s" for rank, v in said.items() if v["seconds"] > BOUND_S + 1.0]
    return {
        "what": f"rank {LOST} of {SIZE} {how}",
        "named_by": ", ".join(str(rank) for rank in said),
        "named": "; ".join(sorted({f"rank {v['missing']} ({v['state']})" for v in said.values()})),
        "seconds": max((v["seconds"] for v in said.values()), default=0.0),
        "bound": BOUND_S,
        "reason": "; ".join(wrong + late),
    }


def lose_a_rank(rank: int, size: int, how: str) -> dict[str, Any]:
    """On each rank of the spare set: some all-reduces, then rank 2 is lost in the middle of them."""
    import torch

    from ..comm import CommSettings, Communicator, RankTimeout
    from .session import join

    settings = CommSettings(timeout_s=BOUND_S)
    comm = Communicator.create(join("own", "cpu", "process_group", settings), settings=settings)
    x = torch.ones(6, 64)
    for _ in range(5):
        comm.all_reduce(x, label="drill:before")
    if rank == LOST:
        os.kill(os.getpid(), _SIGNALS[how])
    start = time.monotonic()
    try:
        comm.all_reduce(x, label="drill:lost")
    except RankTimeout as error:
        seconds = round(time.monotonic() - start, 2)
        return {"missing": error.missing, "state": error.states.get(LOST, "unknown"), "seconds": seconds}
    raise RuntimeError("the all-reduce went through without rank 2")
