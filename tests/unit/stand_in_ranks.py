"""Rank processes over a transport whose hardware is a stand-in, for the tests of `peer` and of `roce`.

A test calls `run_scenarios`; the module that it names ends in `main`.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from dsv41_dist.comm import create
from dsv41_dist.comm import transports as registry
from dsv41_dist.comm.ranks import Ranks

WAIT_S = 90


def run_scenarios(
    module: str, scenarios: Sequence[str], world: int, environment: Mapping[str, str]
) -> dict[str, list[Any]]:
    """Start `python -m MODULE SCENARIO,.. RANK WORLD PORT` for every rank: what each scenario gave, by rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", module, ",".join(scenarios)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(world), str(port)], env={**environment, "OMP_NUM_THREADS": "1"}, **pipes
        )
        for rank in range(world)
    ]
    results: list[dict[str, Any]] = []
    try:
        for rank, process in enumerate(ranks):
            out, err = process.communicate(timeout=WAIT_S)
            assert process.returncode == 0, f"rank {rank}: {err[-3000:]}"
            results.append(json.loads(out.strip().splitlines()[-1]))
    finally:
        for process in ranks:
            process.kill()
    return {name: [result[name] for result in results] for name in scenarios}


def main(name: str, transport: type, scenarios: Mapping[str, Callable[[Ranks], Any]]) -> None:
    """One rank: join over gloo with `transport` in the place of `name`, run what the command line names, print JSON."""
    wanted, rank, world, port = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    use(name, transport)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    ranks = Ranks.from_torch(device="cpu")
    print(json.dumps({one: scenarios[one](ranks) for one in wanted.split(",")}), flush=True)
    dist.barrier()
    clean: Callable[[], None] = getattr(transport, "clean", lambda: None)
    clean()
    os._exit(0)  # a scenario may leave threads that wait for a rank that is lost to them


def use(name: str, transport: type) -> None:
    """Let communicators of this process take `transport` where `name` is asked for."""
    registry.TRANSPORTS[name] = (transport.__module__, transport.__name__)
    original = registry.transport_class
    create.transport_class = lambda wanted: transport if wanted == name else original(wanted)


def mapped(path: str) -> np.ndarray:
    """The bytes of a file that processes share."""
    with open(path, "r+b") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0), dtype=np.uint8)
