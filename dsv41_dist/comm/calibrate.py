"""A route table from measurement: each operation at each size, by the transport whose slowest rank is fastest.

No one transport wins at every size, and where they cross depends on GPU, links, world and library versions; so a table
is measured where it is used, agreed, frozen, and refused anywhere else.

    table = calibrate(comm, label="start").save(path).table
    comm = Communicator.create(ranks, ["peer"], Calibration.load(path, comm).table)
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import torch

from .communicator import Communicator
from .errors import ArgumentError
from .layout import RowSplit
from .routing import Route, RouteTable
from .transports import Call, Transport

__all__ = ["Calibration", "calibrate", "hardware", "routes_from"]

OPS = ("all_reduce", "all_gather", "all_gather_columns", "reduce_scatter", "broadcast")
SIZES = tuple(1 << power for power in range(10, 27))
_INNER = 10


@dataclass(frozen=True)
class Calibration:
    """What was measured and what follows from it.

    Attributes:
        hardware: where it holds; `load` refuses a file from anywhere else.
        rows: (op, bytes, {transport: microseconds per call of the slowest rank}).
        table: the routes.
    """

    hardware: dict[str, str]
    rows: tuple[tuple[str, int, dict[str, float]], ...]
    table: RouteTable

    def save(self, path: str | Path) -> Calibration:
        """Write JSON, at once or not at all: every rank may write the same file, they write the same."""
        text = {
            "hardware": self.hardware,
            "table": self.table.as_json(),
            "digest": self.table.digest(),
            "rows": self.rows,
        }
        partial = Path(f"{path}.{platform.node()}.{os.getpid()}")
        partial.write_text(json.dumps(text, indent=1))
        partial.replace(path)
        return self

    @classmethod
    def load(cls, path: str | Path, comm: Communicator) -> Calibration:
        """Read a saved calibration. Raises ArgumentError when it was made elsewhere or has been edited."""
        try:
            text = json.loads(Path(path).read_text())
            routes = tuple(Route(op, most, name) for op, most, name in text["table"]["routes"])
            table = RouteTable(text["table"]["fallback"], routes)
            rows = tuple((str(op), int(n), dict(times)) for op, n, times in text["rows"])
            made = dict(text["hardware"])
        except (ValueError, KeyError, TypeError) as error:
            raise ArgumentError(f"{path}: not a saved calibration ({type(error).__name__}: {error})") from None
        if table.digest() != text.get("digest"):
            raise ArgumentError(f"{path}: the table was edited after it was measured: calibrate again")
        here = hardware(comm)
        differ = [
            f"{k}: {made.get(k)!r} there, {here.get(k)!r} here"
            for k in sorted(here | made)
            if made.get(k) != here.get(k)
        ]
        if differ:
            raise ArgumentError(f"{path}: measured elsewhere ({'; '.join(differ)}): calibrate again")
        return cls(made, rows, table)


def hardware(comm: Communicator) -> dict[str, str]:
    """What a measurement depends on, without this rank's number: equal on every rank of a uniform group."""
    device = comm.ranks.device
    facts = {
        "world": str(comm.ranks.size),
        "torch": torch.__version__,
        "transports": " ".join(sorted(comm.transports)),
        "device": platform.processor() or platform.machine(),
    }
    if device.type == "cuda":
        facts["device"] = torch.cuda.get_device_name(device)
        facts["nccl"] = ".".join(map(str, import_module("torch.cuda.nccl").version()))
    return facts


def calibrate(comm: Communicator, *, sizes: Sequence[int] = SIZES, repeats: int = 7, label: str) -> Calibration:
    """Measure and agree; collective. bf16; on CUDA inside graphs, as decode runs. About 10 s for all sizes on two GPUs.

    Args:
        sizes: bytes per call as `Route` counts them, in any order.
    Raises what a transport raises, and DisagreementError when ranks do not describe the same hardware.
    """
    facts, sizes = hardware(comm), sorted(set(sizes))
    comm.agreement.same_everywhere([facts, sizes, repeats], label=label)
    rows: list[tuple[str, int, dict[str, float]]] = []
    for op in OPS:
        for nbytes in sizes:
            times: dict[str, float] = {}
            for name, transport in sorted(comm.transports.items()):
                measured = _measure(comm, transport, op, nbytes, repeats)
                if measured is not None:
                    times[name] = measured
            rows.append((op, nbytes, times))
    table = RouteTable(comm.table.fallback, routes_from(rows, comm.table.fallback))
    comm.agreement.same_everywhere(table.digest(), label=label)
    return Calibration(facts, tuple(rows), table)


def routes_from(rows: Sequence[tuple[str, int, dict[str, float]]], fallback: str) -> tuple[Route, ...]:
    """The fastest transport of each size, runs of equal ones joined. Beyond the largest size measured: the fallback.

    A size between two measured ones goes with the larger of them.
    """
    routes: list[Route] = []
    for op in dict.fromkeys(op for op, _, _ in rows):
        best = [(n, min(times, key=lambda name: times[name])) for o, n, times in rows if o == op and times]
        for index, (nbytes, name) in enumerate(best):
            if index + 1 == len(best) or best[index + 1][1] != name:
                routes.append(Route(op, nbytes, name))
        while routes and routes[-1].op == op and routes[-1].transport == fallback:
            routes.pop()
    return tuple(routes)


def _measure(comm: Communicator, transport: Transport, op: str, nbytes: int, repeats: int) -> float | None:
    """Microseconds per call of the slowest rank; None, on every rank, where the transport does not carry it."""
    world, device = comm.ranks.size, comm.ranks.device
    rows = max(world, nbytes // 2 // world * world)
    x = torch.ones(rows, dtype=torch.bfloat16, device=device)
    split = RowSplit.uneven(rows * world - 1, world) if op == "all_gather_columns" else None
    if split is not None:
        x = x[: split.size(comm.ranks.rank)].clone()
    if not transport.takes(Call(op, tuple(x.shape), x.dtype, 0, "sum", split), nbytes):
        return None
    wide = torch.empty(rows * world if split is None else split.n, dtype=x.dtype, device=device)
    part = torch.empty(rows // world, dtype=x.dtype, device=device)
    out = torch.empty_like(x)
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: transport.all_reduce(x, "sum", out),
        "all_gather": lambda: transport.all_gather_rows(x, wide),
        "reduce_scatter": lambda: transport.reduce_scatter(x, "sum", part),
        "broadcast": lambda: transport.broadcast(x, 0),
    }
    if split is not None:
        calls[op] = lambda: transport.all_gather_columns(x, split, wide)
    timed = _time_graph if device.type == "cuda" else _time_eager
    mine = torch.tensor([timed(calls[op], repeats)], dtype=torch.float64, device=device)
    comm.check()
    comm.transports[comm.table.fallback].all_reduce(mine, "max", mine)
    return round(float(mine), 3)


def _time_eager(call: Callable[[], Any], repeats: int) -> float:
    for _ in range(2):
        call()
    times: list[float] = []
    for _ in range(repeats):
        begin = time.perf_counter()
        for _ in range(_INNER):
            call()
        times.append((time.perf_counter() - begin) / _INNER * 1e6)
    return median(times)


def _time_graph(call: Callable[[], Any], repeats: int) -> float:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        for _ in range(_INNER):
            call()
    graph.replay()
    torch.cuda.synchronize()
    times: list[float] = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / _INNER * 1e3)
    return median(times)
