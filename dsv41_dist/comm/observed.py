"""Checked mode and the decision log: a communicator that compares calls before data moves, and writes down each.

Used only when DSV41_COMM_CHECK or DSV41_COMM_LOG is set; otherwise nothing of this is in the path of a call.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import torch

from .communicator import Communicator
from .control import Identity
from .errors import ArgumentError
from .layout import Split

__all__ = ["DecisionLog", "ObservedCommunicator", "first_difference"]

#: What may differ between ranks in a log line.
_OWN = ("t", "rank", "host", "pid")


class DecisionLog:
    """One JSON line per call or decision, flushed at once: DIR/<group>.rank<R>.jsonl."""

    def __init__(self, folder: str, group: str, rank: int) -> None:
        path = Path(folder)
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._file: TextIO = (path / f"{group}.rank{rank}.jsonl").open("a", buffering=1)
        except OSError as error:
            raise ArgumentError(
                f"DSV41_COMM_LOG={folder!r} on rank {rank}: {error.strerror}; name a folder to write to"
            ) from None
        self._rank = rank

    def write(self, entry: dict[str, Any]) -> None:
        self._file.write(json.dumps({"t": round(time.time(), 6), "rank": self._rank, **entry}) + "\n")

    def close(self) -> None:
        self._file.close()

    def start(self) -> None:
        self.write({"op": "start", "label": "start", "seq": 0, "host": os.uname().nodename, "pid": os.getpid()})


class ObservedCommunicator(Communicator):
    """A Communicator whose data calls are first compared over all ranks (`checked`) and logged (`log`)."""

    checked = False
    log: DecisionLog | None = None

    def all_reduce(
        self, x: torch.Tensor, op: str = "sum", *, out: torch.Tensor | None = None, label: str
    ) -> torch.Tensor:
        self._meet("all_reduce", label, x, redop=op)
        return super().all_reduce(x, op, out=out, label=label)

    def all_gather(self, x: torch.Tensor, dim: int = 0, *, out: torch.Tensor | None = None, label: str) -> torch.Tensor:
        self._meet("all_gather", label, x, dim=str(dim))
        return super().all_gather(x, dim, out=out, label=label)

    def all_gather_columns(
        self, x: torch.Tensor, split: Split, *, out: torch.Tensor | None = None, label: str
    ) -> torch.Tensor:
        # A shard's own width differs between ranks by design: the split and the rows are what must be equal.
        self._meet("all_gather_columns", label, x, shape=(*x.shape[:-1], split.n), split=str(split.sizes))
        return super().all_gather_columns(x, split, out=out, label=label)

    def all_gather_rows(
        self, x: torch.Tensor, split: Split, *, out: torch.Tensor | None = None, label: str
    ) -> torch.Tensor:
        self._meet("all_gather_rows", label, x, shape=(split.n, *x.shape[1:]), split=str(split.sizes))
        return super().all_gather_rows(x, split, out=out, label=label)

    def reduce_scatter(
        self,
        x: torch.Tensor,
        op: str = "sum",
        *,
        dim: int = 0,
        exact: bool = False,
        out: torch.Tensor | None = None,
        label: str,
    ) -> torch.Tensor:
        self._meet("reduce_scatter", label, x, redop=op, exact=str(exact))
        return super().reduce_scatter(x, op, dim=dim, exact=exact, out=out, label=label)

    def broadcast(self, x: torch.Tensor, src: int = 0, *, label: str) -> torch.Tensor:
        self._meet("broadcast", label, x, src=str(src))
        return super().broadcast(x, src, label=label)

    def barrier(self, *, label: str) -> None:
        self._meet("barrier", label, None)
        super().barrier(label=label)

    def close(self) -> None:
        super().close()
        if self.log is not None:
            self.log.close()

    def _meet(
        self, op: str, label: str, x: torch.Tensor | None, shape: Sequence[int] | None = None, **facts: str
    ) -> None:
        self._watch.raise_if_closed()
        fields = dict(facts)
        if x is not None:
            fields["dtype"] = str(x.dtype).removeprefix("torch.")
            fields["shape"] = str(tuple(x.shape if shape is None else shape))
            fields["device"] = x.device.type
        if self.log is not None:
            self.log.write({"seq": self._watch.seq + 1, "op": op, "label": label, **fields})
        # Voting inside a graph capture is not possible; what a graph holds was checked by its eager run.
        capturing = x is not None and x.is_cuda and torch.cuda.is_current_stream_capturing()
        if self.checked and not capturing:
            self._watch.enter(label)
            self._control.vote(Identity(op, label, tuple(sorted(fields.items()))))


def first_difference(folder: str) -> dict[str, Any] | None:
    """Where the decision logs of a folder first differ between ranks: {"group", "index", "said": {rank: entry}}; None
    if nowhere.

    A log that is shorter than another differs at its end (entry None); a last line that was cut is not part of its log.
    Raises ArgumentError for logs that cannot be read, and where none differ but ranks' logs are missing.
    """
    logs: dict[str, dict[int, list[dict[str, Any]]]] = {}
    for path in sorted(Path(folder).glob("*.rank*.jsonl")):
        group, _, rank = path.name.removesuffix(".jsonl").rpartition(".rank")
        if not rank.isdecimal():
            raise ArgumentError(f"'{path}': allowed is GROUP.rank<N>.jsonl with a number N; move other files away")
        logs.setdefault(group, {})[int(rank)] = _entries(path)
    if not logs:
        raise ArgumentError(f"{folder!r}: no decision logs (*.rank*.jsonl) in it; set DSV41_COMM_LOG to write some")
    for group, by_rank in logs.items():
        for index in range(max(map(len, by_rank.values()))):
            said = {rank: log[index] if index < len(log) else None for rank, log in by_rank.items()}
            if len({json.dumps(entry, sort_keys=True) for entry in said.values()}) > 1:
                return {"group": group, "index": index, "said": said}
    for group, by_rank in logs.items():
        gaps = sorted(set(range(max(by_rank))) - set(by_rank))
        if gaps:
            missing = f"the logs of ranks {', '.join(map(str, gaps))} are missing"
        elif len(by_rank) < 2:
            missing = f"there is a log of rank {min(by_rank)} alone"
        else:
            continue
        raise ArgumentError(f"{folder!r}, {group}: {missing}; put the logs of all ranks into one folder")
    return None


def _entries(path: Path) -> list[dict[str, Any]]:
    """What one rank decided, without what may differ between ranks."""
    entries: list[dict[str, Any]] = []
    # What is not ASCII was not written by us: it becomes an escape that JSON does not have.
    lines = path.read_text(encoding="ascii", errors="backslashreplace").rstrip().split("\n")
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line) if line.strip() else {}
        except ValueError:
            entry = None
        if isinstance(entry, dict):
            entries += [_shared(entry)] if entry else []
        elif number < len(lines):  # the last line of a rank that died may be cut
            raise ArgumentError(
                f"'{path}': line {number} is no entry of a decision log; use a fresh folder for each run"
            )
    return entries


def _shared(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if name not in _OWN}
