"""What the peer benchmarks share: a group from torchrun, timing inside CUDA graphs, rows in the project's JSON.

A figure is microseconds per call: a graph of INNER calls is replayed, its time by CUDA events over INNER; the median
over replays on each rank, then the slowest rank's. Before each, the GPU sleeps while the host puts the replay down, and
a barrier on the device lets all ranks begin together: what is timed is the calls, not how far apart the hosts are.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from dsv41_dist.comm.communicator import Communicator
from dsv41_dist.comm.ranks import Ranks
from dsv41_dist.comm.settings import CommSettings
from dsv41_dist.kernels import peer as kernels

INNER = 20
_groups: list[kernels.Group] = []
BUSBW = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_gather": lambda n: float(n - 1),  # bytes are one rank's shard here
    "all_gather_columns": lambda n: float(n - 1),
    "broadcast": lambda n: 1.0,
}


def start(timeout_s: float = 20.0) -> tuple[Ranks, Communicator]:
    """Join torchrun's group over NCCL and connect peer; exits with its reason when it does not connect."""
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local))
    ranks = Ranks.from_torch(device=torch.device("cuda", local))
    comm = Communicator.create(ranks, ["peer"], None, CommSettings(timeout_s=timeout_s))
    if "peer" not in comm.transports:
        raise SystemExit("peer did not connect: see the warning above")
    _groups[:] = [comm.transports["peer"]._ready()]
    return ranks, comm


def align() -> None:
    torch.cuda._sleep(100_000)  # about 50 us
    kernels.barrier(_groups[0], 10.0)


def capture(fn: Callable[[], object], inner: int = INNER) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            fn()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        for _ in range(inner):
            fn()
    return graph


def replay_times(graph: torch.cuda.CUDAGraph, replays: int, inner: int = INNER) -> list[float]:
    """Microseconds per call of each replay, on this rank, ascending."""
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    dist.barrier()
    times: list[float] = []
    for _ in range(replays):
        begin, end = torch.cuda.Event(True), torch.cuda.Event(True)
        align()
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / inner * 1e3)
    return sorted(times)


def eager_times(fn: Callable[[], object], replays: int, inner: int = INNER) -> list[float]:
    for _ in range(5):
        fn()
    torch.cuda.synchronize()
    dist.barrier()
    times: list[float] = []
    for _ in range(replays):
        begin, end = torch.cuda.Event(True), torch.cuda.Event(True)
        align()
        begin.record()
        for _ in range(inner):
            fn()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / inner * 1e3)
    return sorted(times)


def slowest(times: list[float]) -> tuple[list[float], int]:
    """The times of the rank whose median is largest, and its number: the same on every rank."""
    everyone = torch.zeros(dist.get_world_size(), len(times), device="cuda")
    dist.all_gather_into_tensor(everyone.view(-1), torch.tensor(times, device="cuda"))
    medians = everyone.median(dim=1).values
    rank = int(medians.argmax())
    return everyone[rank].tolist(), rank


def agree_wrong(wrong: int) -> int:
    """The sum over ranks of what was wrong."""
    total = torch.tensor([wrong], device="cuda")
    dist.all_reduce(total)
    return int(total)


def wrong_bytes(got: torch.Tensor, want: torch.Tensor) -> int:
    """How many elements differ in their bytes."""
    item = got.element_size()
    differ = got.contiguous().view(-1).view(torch.uint8) != want.contiguous().view(-1).view(torch.uint8)
    return int(differ.view(-1, item).any(dim=1).sum())


def row(
    op: str, x: torch.Tensor, transport: str, graph: bool, times: list[float], wrong: int, **more: Any
) -> dict[str, Any]:
    """One row of the project's JSON, from the slowest rank's times. bytes: what one rank sends (Route's definition)."""
    found, rank = slowest(times)
    p50 = statistics.median(found)
    nbytes = more.pop("nbytes", x.nbytes)
    world = dist.get_world_size()
    algbw = nbytes / p50 / 1e3
    return {
        "op": op,
        "bytes": nbytes,
        "count": nbytes // x.element_size(),
        "dtype": str(x.dtype).removeprefix("torch."),
        "redop": "sum" if op in ("all_reduce", "reduce_scatter") else "none",
        "transport": transport,
        "graph": graph,
        "p50_us": round(p50, 3),
        "p99_us": round(found[-1] if len(found) < 100 else found[int(len(found) * 0.99)], 3),
        "cv": round(statistics.pstdev(found) / statistics.fmean(found), 4),
        "algbw_gbps": round(algbw, 3),
        "busbw_gbps": round(algbw * BUSBW[op](world), 3),
        "wrong": wrong,
        "slowest_rank": rank,
        **more,
    }


def size_name(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"
