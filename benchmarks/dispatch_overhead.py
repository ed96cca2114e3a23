"""What `Communicator.all_reduce` costs over the raw torch call:

    PYTHONPATH=. python benchmarks/dispatch_overhead.py [--json FILE]

A group of one rank over gloo, where the collective itself is as cheap as it gets. The ways are timed in turn, many
short blocks each, so that a slow moment of the machine hits all alike; figures are medians over blocks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dsv41_dist.cli.environment import environment
from dsv41_dist.comm import CommSettings, Communicator, Ranks

BLOCKS, CALLS = 200, 200


def block(call: Callable[[], Any]) -> float:
    """Microseconds per call over one block."""
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - start) / CALLS * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="write the results to this file")
    options = parser.parse_args()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    settings = CommSettings()
    comm = Communicator.create(Ranks.from_torch(), settings=settings)
    checked = Communicator.create(Ranks.from_torch(), settings=CommSettings(check=True))
    x = torch.ones(6, 5120, dtype=torch.bfloat16)
    ways: dict[str, Callable[[], Any]] = {
        "torch.distributed.all_reduce": lambda: dist.all_reduce(x),
        "Communicator.all_reduce": lambda: comm.all_reduce(x, out=x, label="bench"),
        "Communicator.all_reduce, checked mode": lambda: checked.all_reduce(x, out=x, label="bench"),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for call in ways.values():
        block(call)
    for _ in range(BLOCKS):
        for name, call in ways.items():
            times[name].append(block(call))
    raw = statistics.median(times["torch.distributed.all_reduce"])
    rows = []
    for name, values in times.items():
        ordered = sorted(values)
        p50 = statistics.median(ordered)
        rows.append(
            {
                "op": "all_reduce",
                "what": name,
                "bytes": x.nbytes,
                "count": x.numel(),
                "dtype": "bfloat16",
                "redop": "sum",
                "transport": "process_group",
                "graph": 0,
                "p50_us": round(p50, 3),
                "p99_us": round(ordered[int(0.99 * len(ordered))], 3),
                "cv": round(statistics.pstdev(values) / statistics.fmean(values), 4),
                "over_torch_us": round(p50 - raw, 3),
                "algbw_gbps": round(x.nbytes / p50 / 1e3, 4),
                "busbw_gbps": 0.0,
                "wrong": None,
                "slowest_rank": 0,
            }
        )
        print(f"{name:<40} {p50:8.2f} us   {p50 - raw:+7.2f} us over torch")
    if options.json:
        results = {"env": environment(1, "own", "cpu", settings), "rows": rows}
        Path(options.json).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
