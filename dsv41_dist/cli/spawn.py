"""Rank sets on this machine: N processes that are one torch group, watched by the process that started them.

The starter serves the store, so any rank may die or stop and the others can still say who. Processes come from a fork
server that has torch imported already: a set of four starts in about the time of one import. No rank outlives its
starter.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import multiprocessing.connection
import os
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from ..comm.errors import ArgumentError

__all__ = ["RankResult", "RankSet", "run_ranks"]

_PR_SET_PDEATHSIG = 1
_MOST_THREADS = 1024
_PRELOAD = ["torch", "torch.distributed", "dsv41_dist.comm.create", "dsv41_dist.comm.transports.process_group"]


@dataclass
class RankResult:
    """How one rank ended: its return value, or its error as one line with the traceback apart."""

    rank: int
    value: Any = None
    error: str | None = None
    trace: str = ""
    exitcode: int | None = None

    @property
    def ok(self) -> bool:
        return self.exitcode == 0 and self.error is None


@dataclass
class RankSet:
    """`size` processes that each call `target(rank, size, *args)` with torch.distributed's environment set.

    `target` must be importable by name. Use as a context manager: leaving it ends every process that is left.
    """

    size: int
    target: Callable[..., Any]
    args: Sequence[Any] = ()
    env: dict[int, dict[str, str]] = field(default_factory=dict[int, dict[str, str]])

    def __enter__(self) -> RankSet:
        threads = _threads()
        import torch.distributed as dist

        self._store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=300)
        )
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        self._pipes: list[multiprocessing.connection.Connection] = []
        self.processes: list[Any] = []
        for rank in range(self.size):
            ours, theirs = context.Pipe(duplex=False)
            variables = {
                "RANK": str(rank),
                "WORLD_SIZE": str(self.size),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(self.size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self._store.port),
                # env:// then connects to the store served here instead of serving one in rank 0.
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                # Ranks share the machine's cores: threads of their own would only fight over them.
                "OMP_NUM_THREADS": threads,
                "PYTHONWARNINGS": os.environ.get("PYTHONWARNINGS", ""),
                **{name: value for name, value in os.environ.items() if name.startswith(("DSV41_", "SPARK_"))},
                **self.env.get(rank, {}),
            }
            process = context.Process(
                target=_child, args=(theirs, variables, self.target, rank, self.size, tuple(self.args))
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)
        self.results = [RankResult(rank) for rank in range(self.size)]
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def pid(self, rank: int) -> int:
        return self.processes[rank].pid

    def stop(self, rank: int) -> None:
        """SIGSTOP: the process is there but does nothing, like a machine that hangs."""
        os.kill(self.pid(rank), signal.SIGSTOP)

    def resume(self, rank: int) -> None:
        os.kill(self.pid(rank), signal.SIGCONT)

    def kill(self, rank: int) -> None:
        os.kill(self.pid(rank), signal.SIGKILL)

    def wait(
        self, timeout_s: float, ranks: Sequence[int] | None = None, fail_fast_s: float | None = None
    ) -> list[RankResult]:
        """The results of `ranks` (all by default) once they have ended, or when the time is up (exitcode None then).

        With `fail_fast_s`, the first rank that fails gives the others that long to say what they have to say.
        """
        waiting = set(range(self.size) if ranks is None else ranks)
        deadline = time.monotonic() + timeout_s
        failed = False
        while waiting and time.monotonic() < deadline:
            left = max(0.0, deadline - time.monotonic())
            ready = multiprocessing.connection.wait(
                [self.processes[r].sentinel for r in waiting] + [self._pipes[r] for r in waiting],
                timeout=min(left, 1.0),
            )
            for rank in list(waiting):
                if self._pipes[rank] in ready or self.processes[rank].sentinel in ready:
                    self._collect(rank)
                if self.processes[rank].sentinel in ready:
                    self.processes[rank].join(1.0)
                    self.results[rank].exitcode = self.processes[rank].exitcode
                    waiting.discard(rank)
                    if not self.results[rank].ok and fail_fast_s is not None and not failed:
                        failed = True
                        deadline = min(deadline, time.monotonic() + fail_fast_s)
        return [self.results[r] for r in sorted(range(self.size) if ranks is None else ranks)]

    def end(self) -> None:
        """Kill what is left, stopped processes too."""
        for process in self.processes:
            if process.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
        for process, pipe in zip(self.processes, self._pipes, strict=True):
            process.join(5.0)
            pipe.close()

    def _collect(self, rank: int) -> None:
        with contextlib.suppress(EOFError, OSError):
            while self._pipes[rank].poll(0):
                kind, content, trace = self._pipes[rank].recv()
                if kind == "value":
                    self.results[rank].value = content
                else:
                    self.results[rank].error, self.results[rank].trace = content, trace


def run_ranks(
    size: int,
    target: Callable[..., Any],
    *args: Any,
    timeout_s: float = 120.0,
    env: dict[int, dict[str, str]] | None = None,
    fail_fast_s: float = 3.0,
) -> list[RankResult]:
    """Start a set, wait for it, end it: the results by rank. An exception on one rank ends the group."""
    with RankSet(size, target, args, env or {}) as ranks:
        return ranks.wait(timeout_s, fail_fast_s=fail_fast_s)


def _threads() -> str:
    """OMP_NUM_THREADS for a rank, 1 if it is not set. Raises ArgumentError for what torch cannot take as a number."""
    text = os.environ.get("OMP_NUM_THREADS", "1")
    if not text.isdecimal() or not 1 <= int(text) <= _MOST_THREADS:
        raise ArgumentError(
            f"OMP_NUM_THREADS={text!r}: allowed is one integer from 1 to {_MOST_THREADS} for ranks started here; "
            "set it so, or unset it"
        )
    return text


def _let_the_fork_server_see_the_starter_die() -> None:
    """No orphans: the fork server ends when the last holder of a pipe's write end is gone, and its children with it by
    PR_SET_PDEATHSIG (a stopped one too). multiprocessing hands that write end to every child as well; given up here.
    """
    from multiprocessing import forkserver

    alive = getattr(getattr(forkserver, "_forkserver", None), "_forkserver_alive_fd", None)
    if alive is not None:
        with contextlib.suppress(OSError):
            os.close(alive)


def _child(
    pipe: Any, variables: dict[str, str], target: Callable[..., Any], rank: int, size: int, args: tuple[Any, ...]
) -> None:
    _let_the_fork_server_see_the_starter_die()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for name in [n for n in os.environ if n.startswith(("DSV41_", "SPARK_"))]:
        del os.environ[name]
    os.environ.update(variables)
    import torch

    torch.set_num_threads(int(variables["OMP_NUM_THREADS"]))
    code = 0
    try:
        pipe.send(("value", target(rank, size, *args), ""))
    except BaseException as error:
        code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
        if not (isinstance(error, SystemExit) and code == 0):
            text = f"{type(error).__name__}: {error}"
            with contextlib.suppress(OSError):
                pipe.send(("error", text, traceback.format_exc()))
    import sys

    sys.stdout.flush()
    sys.stderr.flush()
    # A backend thread that still waits for a lost peer would hold up a normal exit.
    os._exit(code)
