"""Bounded waits. Every wait of this layer goes through a `Watch`, and ends in a result or in one error on every live
rank.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn, Protocol

import torch

from .beacon import Beacon, error_from
from .errors import CommError, RankTimeout, TransportError
from .ranks import Ranks
from .settings import CommSettings

__all__ = ["Watch"]

_counters: dict[str, int] = {}
_counters_lock = threading.Lock()


class _Work(Protocol):
    def wait(self, timeout: timedelta = ...) -> Any: ...

    def is_completed(self) -> bool: ...


class Watch:
    """The position of this rank (label, seq), the bound of its waits, and what has closed its communicator.

    Created once per communicator, in the same order on every rank. The first failure is final: every later call raises
    it again; it never goes on with another transport, and never returns stale bytes.
    """

    def __init__(self, ranks: Ranks, settings: CommSettings) -> None:
        self.ranks = ranks
        self.settings = settings
        self.label = "(none)"
        self.seq = 0
        self._closed_by: Callable[[], CommError] | None = None
        self.bound_s = settings.init_timeout_s
        self._slice = timedelta(seconds=settings.heartbeat_s)
        self._pending: list[Any] = []
        self._beacon: Beacon | None = None
        #: tells this communicator's side channel and log from those of others over the same ranks
        self.name = _next_name(ranks)
        if ranks.size > 1 and ranks.store is not None:
            self._beacon = Beacon(ranks, self.name, settings.heartbeat_s, lambda: (self.label, self.seq))

    def started(self) -> None:
        """The group is complete: from here on the steady bound holds instead of the one for start-up."""
        self.bound_s = self.settings.timeout_s

    def wait(self, work: _Work, buffers: Any = None) -> None:
        """Wait for a torch Work. `buffers` are kept alive when the wait fails: the backend may still write to them.

        For CUDA this orders the current stream after the work and does not block; `wait_device` is the host's wait.
        """
        deadline: float | None = None
        while True:
            try:
                work.wait(self._slice)
                return
            except RuntimeError:
                if work.is_completed():
                    self._completed(work, buffers)
                    return
            now = time.monotonic()
            deadline = now - self.settings.heartbeat_s + self.bound_s if deadline is None else deadline
            if self._verdict_is_in() or now >= deadline:
                self._pending.append((work, buffers))
                self._fail(f"no answer within {self.bound_s:g} s")

    def _completed(self, work: _Work, buffers: Any) -> None:
        # It may have ended well just as the slice did, so the error of that wait says nothing: ask again.
        try:
            work.wait(self._slice)
        except RuntimeError as error:
            self._pending.append((work, buffers))
            self._fail(f"the backend says: {_first_line(error)}")

    def wait_until(self, done: Callable[[], bool], buffers: Any = None) -> None:
        """Poll `done` (an MPI request, a CUDA event) with the same bound: hot at first, then yielding the core."""
        for _ in range(50):
            if done():
                return
        started = time.monotonic()
        deadline = started + self.bound_s
        while not done():
            now = time.monotonic()
            if now >= deadline or self._verdict_is_in():
                self._pending.append((done, buffers))
                self._fail(f"no answer within {self.bound_s:g} s")
            if now - started < 0.002:
                os.sched_yield()
            else:
                time.sleep(0.0001)

    def wait_device(self) -> None:
        """Wait on the host until the current CUDA stream has run what was put on it, with the same bound."""
        if self.ranks.device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
            self.wait_until(event.query)

    def enter(self, label: str) -> None:
        """A call begins: the position others see, and the check that nothing has closed the communicator."""
        self.raise_if_closed()
        self.seq += 1
        self.label = label

    def raise_if_closed(self) -> None:
        """Raise what has closed the communicator, if anything has, here or on another rank."""
        if self.closed:
            self._fail("another rank reported it")

    def report(self, reason: str, absent: Sequence[int] = ()) -> NoReturn:
        """Close the communicator on every rank because of what happened in a transport, and raise.

        `absent` are ranks that the transport saw missing where the host's positions do not show it (a graph replay).
        """
        self._fail(reason, absent)

    def arbitrate(self, key: str, proposal: str, forget: str | None) -> str:
        """The first proposal any rank made for `key`: the same string on every rank."""
        if self._beacon is None:
            return proposal
        answer = self._beacon.arbitrate(key, proposal, forget, self.bound_s)
        if answer is None:
            self._fail("the store that settles votes does not answer")
        return answer

    @property
    def closed(self) -> bool:
        """Whether a failure has closed the communicator, here or on another rank."""
        return self._closed_by is not None or self._verdict_is_in()

    def close(self) -> None:
        """Stop the side channel; whoever calls afterwards is told. Never raises."""
        if self._closed_by is None:
            self._closed_by = lambda: TransportError("the communicator was closed on this rank by close()")
        if self._beacon is not None:
            self._beacon.stop()

    def _verdict_is_in(self) -> bool:
        return self._beacon is not None and self._beacon.verdict is not None

    def _fail(self, reason: str, absent: Sequence[int] = ()) -> NoReturn:
        if self._closed_by is None:
            self._closed_by = self._find_out(reason, absent)
        # A new object each time: a raised exception collects the tracebacks of its raisers.
        raise self._closed_by()

    def _find_out(self, reason: str, absent: Sequence[int]) -> Callable[[], CommError]:
        beacon, label, seq = self._beacon, self.label, self.seq
        if beacon is None:
            return lambda: TransportError(f"{label!r} #{seq} failed: {reason}; no side channel to name a missing rank")
        beacon.ask(reason, label, seq, absent)
        # The beacon answers in three heartbeats; when it cannot, the store's host is what is missing.
        if beacon.answered.wait(4 * self.settings.heartbeat_s + 3.0) and beacon.verdict is not None:
            verdict = beacon.verdict
            return lambda: error_from(verdict)
        lost = beacon.lost or "its host does not answer"
        missing = [0] if self.ranks.rank != 0 else []
        detail = f"{reason}; the side channel is lost too ({lost}), and with it the process that serves the store"
        reached = {self.ranks.rank: (label, seq)}
        return lambda: RankTimeout(missing, label, seq, reached, {0: "silent"}, detail)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _next_name(ranks: Ranks) -> str:
    """A store prefix of this communicator's own: stale records of an earlier one must not speak for it."""
    with _counters_lock:
        number = _counters.get(ranks.name, 0)
        _counters[ranks.name] = number + 1
    return f"{ranks.name}.comm{number}"
