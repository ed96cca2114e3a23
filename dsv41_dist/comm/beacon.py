"""The side channel: each rank's position in a torch store, and one verdict for all about who is missing.

A thread per rank publishes (seq, label) every heartbeat and looks for a verdict. When a call does not complete, the
rank that notices first compares the positions, looks at the processes it can see, and writes the verdict with an
atomic compare-and-set; every live rank raises that one verdict. A stuck rank is still nameable: its thread, or its
last record, speaks for it. Uniform outcomes from an arbiter outside the group: the contract of MPI ULFM's
MPIX_Comm_agree.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from .errors import CommError, RankTimeout, TransportError
from .ranks import Ranks, host_identity

__all__ = ["Beacon", "decide_missing", "error_from"]

_VERDICT = "verdict"


class _Request:
    """One compare-and-set for the thread to do."""

    def __init__(self, key: str, proposal: str, forget: str | None) -> None:
        self.key, self.proposal, self.forget = key, proposal, forget
        self.answer: str | None = None
        self.done = threading.Event()


class Beacon:
    """Publishes this rank's position and finds out who is missing. All store traffic is on its thread."""

    def __init__(self, ranks: Ranks, name: str, heartbeat_s: float, position: Callable[[], tuple[str, int]]) -> None:
        import torch.distributed as dist

        assert ranks.store is not None
        self._ranks = ranks
        self._store = dist.PrefixStore(name, ranks.store)
        self._heartbeat = heartbeat_s
        self._position = position
        self._identity = host_identity()
        self._beat = 0
        self._question: tuple[str, str, int, tuple[int, ...]] | None = None  # reason, label, seq, absent
        self._wake = threading.Event()
        self._stopped = False
        self._requests: queue.SimpleQueue[_Request] = queue.SimpleQueue()
        self.answered = threading.Event()
        self.verdict: dict[str, Any] | None = None
        self.lost: str | None = None  # why the store cannot be reached any more
        self._publish()
        self._thread = threading.Thread(target=self._run, name=f"dsv41-beacon-{ranks.rank}", daemon=True)
        self._thread.start()

    def ask(self, reason: str, label: str, seq: int, absent: Sequence[int] = ()) -> None:
        """Start finding out why the call (label, seq) did not complete; `answered` is set when that is known.

        `absent` are ranks that the transport itself saw missing (a device may know what no host position shows).
        """
        self._question = (reason, label, seq, tuple(absent))
        self._wake.set()

    def arbitrate(self, key: str, proposal: str, forget: str | None, bound_s: float) -> str | None:
        """The first proposal any rank made for `key`, on every rank; None when the store did not answer in time.

        `forget` names a key nobody needs any more. On the beacon's thread because a store whose host is stopped
        blocks its caller without a bound.
        """
        request = _Request(key, proposal, forget)
        self._requests.put(request)
        self._wake.set()
        return request.answer if request.done.wait(bound_s) else None

    def stop(self) -> None:
        self._stopped = True
        self._wake.set()
        self._thread.join(timeout=2.0)

    def _run(self) -> None:
        next_beat = 0.0
        while not self._stopped:
            try:
                self._serve()
                now = time.monotonic()
                if now < next_beat and (self._question is None or self.verdict is not None):
                    self._wake.wait(next_beat - now)
                    self._wake.clear()
                    continue
                next_beat = now + self._heartbeat
                self._publish()
                if self.verdict is None and self._store.check([_VERDICT]):
                    self._settle(json.loads(self._store.get(_VERDICT)))
                if self._question is not None and self.verdict is None:
                    self._find_out(*self._question)
            except Exception as error:  # the store went away; the ranks may be fine
                self.lost = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                if self._question is not None:
                    self.answered.set()
                    return
                time.sleep(self._heartbeat)

    def _serve(self) -> None:
        while not self._requests.empty():
            request = self._requests.get()
            request.answer = self._store.compare_set(request.key, "", request.proposal).decode()
            if request.forget is not None:
                self._store.delete_key(request.forget)
            request.done.set()

    def _publish(self) -> None:
        label, seq = self._position()
        self._beat += 1
        record = {
            "label": label,
            "seq": seq,
            "beat": self._beat,
            "table": self._identity.table,
            "pid": self._identity.pid,
            "host": self._identity.host,
            "waiting": self._question is not None,
        }
        self._store.set(f"at/{self._ranks.rank}", json.dumps(record))

    def _records(self) -> dict[int, dict[str, Any]]:
        """Every rank's last record; a rank that has never published is left out."""
        found: dict[int, dict[str, Any]] = {}
        for rank in range(self._ranks.size):
            key = f"at/{rank}"
            if self._store.check([key]):
                found[rank] = json.loads(self._store.get(key))
        return found

    def _find_out(self, reason: str, label: str, seq: int, absent: tuple[int, ...]) -> None:
        before = self._records()
        # Records may be one heartbeat old, and a rank may have arrived meanwhile: two beats make the picture fresh.
        deadline = time.monotonic() + 2 * self._heartbeat + 0.1
        while time.monotonic() < deadline:
            time.sleep(min(0.05, self._heartbeat))
            self._publish()
            if self._store.check([_VERDICT]):
                self._settle(json.loads(self._store.get(_VERDICT)))
                return
        proposal = decide_missing(self._ranks, before, self._records(), reason, label, seq, absent)
        text = self._store.compare_set(_VERDICT, "", json.dumps(proposal))
        self._settle(json.loads(text))

    def _settle(self, verdict: dict[str, Any]) -> None:
        self.verdict = verdict
        self._question = None
        self.answered.set()


def decide_missing(
    ranks: Ranks,
    before: dict[int, dict[str, Any]],
    now: dict[int, dict[str, Any]],
    reason: str,
    label: str,
    seq: int,
    absent: Sequence[int] = (),
) -> dict[str, Any]:
    """Who is missing from the call (label, seq), from two looks at the records a few heartbeats apart.

    Missing is a rank that is behind, that is gone (process dead or stopped, or silent on another host), or that is in
    another call than most at the same number; and `absent`, which the transport saw missing itself.
    """
    states: dict[int, str] = {}
    missing: set[int] = set(absent)
    for rank in range(ranks.size):
        record = now.get(rank)
        if record is None:
            states[rank] = "unknown"
            missing.add(rank)
            continue
        moved = rank not in before or record["beat"] != before[rank]["beat"]
        states[rank] = _process_state(record) if rank != ranks.rank else "alive"
        if states[rank] == "unknown":
            states[rank] = "alive" if moved else "silent"
        gone = states[rank] in ("dead", "stopped", "silent") and record["seq"] <= seq
        if gone or record["seq"] < seq:
            missing.add(rank)
    here = [rank for rank in range(ranks.size) if rank not in missing and now[rank]["seq"] == seq]
    labels: dict[str, list[int]] = {}
    for rank in here:
        labels.setdefault(now[rank]["label"], []).append(rank)
    if len(labels) > 1:
        # Most ranks, or rank 0 where it is a draw, are taken to be in the right call: the same answer on every rank.
        right = max(labels.values(), key=lambda members: (len(members), -members[0]))
        missing.update(rank for rank in here if rank not in right)
    return {
        "missing": sorted(missing),
        "label": label,
        "seq": seq,
        "reason": reason,
        "reached": {str(rank): [record["label"], record["seq"]] for rank, record in now.items()},
        "states": {str(rank): states[rank] for rank in sorted(missing)},
    }


def _process_state(record: dict[str, Any]) -> str:
    """What /proc says of a process of this host: dead, stopped or alive; unknown when it runs elsewhere."""
    identity = host_identity()
    if not identity.table or record["table"] != identity.table or record["host"] != identity.host:
        return "unknown"
    try:
        with open(f"/proc/{record['pid']}/stat") as file:
            state = file.read().rpartition(")")[2].split()[0]
    except OSError:
        return "dead"
    return {"Z": "dead", "X": "dead", "T": "stopped", "t": "stopped"}.get(state, "alive")


def error_from(verdict: dict[str, Any]) -> CommError:
    """The exception that every live rank raises for a verdict."""
    reached = {int(rank): (str(at[0]), int(at[1])) for rank, at in verdict["reached"].items()}
    if verdict["missing"]:
        states = {int(rank): str(state) for rank, state in verdict["states"].items()}
        return RankTimeout(
            verdict["missing"], verdict["label"], verdict["seq"], reached, states, detail=verdict["reason"]
        )
    where = ", ".join(f"rank {rank} in {label!r} #{seq}" for rank, (label, seq) in sorted(reached.items()))
    return TransportError(
        f"{verdict['label']!r} #{verdict['seq']} failed though every rank is alive ({where}): {verdict['reason']}. "
        "The communicator is closed: restart the group, with DSV41_COMM_CHECK=1 if ranks may make different calls."
    )
