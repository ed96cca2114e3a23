"""Timing one call over the ranks of a group: per-iteration times of every rank, reduced to one line."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..comm import Communicator
from .ops import Ready

__all__ = ["local_times", "summarise", "time_calls", "timed"]


def time_calls(
    comm: Communicator, ready: Ready, iterations: int, warmup: int, graphs: int, check: bool = True
) -> tuple[list[float], int]:
    """This rank's time of each iteration in microseconds, and the wrong elements of a run before and of one after them
    (with `graphs` the one after is a replay); 0 without `check`.

    CPU: wall clock around each call. GPU: CUDA events around each call; with `graphs` K, `iterations` calls are
    captured into one CUDA graph that is replayed K times, and a time is that of a replay over the calls in it.
    """
    wrong = ready.wrong() if check else 0
    for _ in range(warmup):
        ready.call()
    times, again = timed(comm, ready.call, iterations, graphs)
    if check:
        ready.reset()
        again()
        wrong += ready.verify()
    return times, wrong


def timed(
    comm: Communicator, call: Callable[[], Any], iterations: int, graphs: int
) -> tuple[list[float], Callable[[], Any]]:
    """(microseconds of each call, or of each replay over the calls in it; what runs it again). See `time_calls`."""
    if comm.ranks.device.type != "cuda":
        comm.barrier(label="bench:start")
        times: list[float] = []
        for _ in range(iterations):
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e6)
        return times, call
    if graphs:
        return _time_graph(comm, call, iterations, graphs)
    comm.synchronize(label="bench:warm")
    comm.barrier(label="bench:start")
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(iterations + 1)]
    _align(comm)
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    comm.synchronize(label="bench:end")
    return [a.elapsed_time(b) * 1e3 for a, b in itertools.pairwise(marks)], call


def _time_graph(
    comm: Communicator, call: Callable[[], Any], iterations: int, graphs: int
) -> tuple[list[float], Callable[[], Any]]:
    graph = _captured(call, iterations, lambda: comm.synchronize(label="bench:warm"))
    for _ in range(3):
        graph.replay()
    comm.synchronize(label="bench:captured")
    comm.barrier(label="bench:start")
    times: list[float] = []
    for _ in range(graphs):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        _align(comm)
        start.record()
        graph.replay()
        end.record()
        comm.synchronize(label="bench:replay")
        times.append(start.elapsed_time(end) * 1e3 / iterations)
    return times, graph.replay


def local_times(call: Callable[[], Any], iterations: int, graphs: int, cuda: bool) -> list[float]:
    """Microseconds per call on this process alone: of each call, or of each replay of a graph of `iterations` calls."""
    for _ in range(3):
        call()
    if not cuda:
        times: list[float] = []
        for _ in range(iterations):
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e6)
        return times
    again, inner, rounds = call, 1, iterations
    if graphs:
        again, inner, rounds = _captured(call, iterations, torch.cuda.synchronize).replay, iterations, graphs
        again()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(rounds + 1)]
    torch.cuda._sleep(100_000)
    marks[0].record()
    for mark in marks[1:]:
        again()
        mark.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) * 1e3 / inner for a, b in itertools.pairwise(marks)]


def _captured(call: Callable[[], Any], iterations: int, synchronize: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of `iterations` calls, warmed on a side stream."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(iterations):
            call()
    return graph


def _align(comm: Communicator) -> None:
    """Let the devices begin together: they sleep while the hosts put the work down, then meet. What is timed is the
    calls, not how far apart the hosts are."""
    torch.cuda._sleep(100_000)  # cycles: about 50 us
    comm.all_reduce(torch.zeros(1, device=comm.ranks.device), label="bench:align")


def summarise(by_rank: Sequence[Sequence[float]]) -> dict[str, float | int]:
    """One line from every rank's times: an iteration takes as long as its slowest rank.

    Returns time_us (mean), p50_us, p99_us, cv (standard deviation over mean), slowest_rank (largest own median).
    """
    slowest = [max(times) for times in zip(*by_rank, strict=True)]
    mean = statistics.fmean(slowest)
    ordered = sorted(slowest)
    medians = [statistics.median(times) for times in by_rank]
    return {
        "time_us": round(mean, 3),
        "p50_us": round(statistics.median(ordered), 3),
        "p99_us": round(ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))], 3),
        "cv": round(statistics.pstdev(slowest) / mean, 4) if mean else 0.0,
        "slowest_rank": max(range(len(medians)), key=medians.__getitem__),
    }
