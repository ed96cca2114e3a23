"""Compares what two boots produced. Pure data: what the ranks recorded and what the engine answered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Comparison", "Outcome", "compare"]


@dataclass
class Outcome:
    """One boot as it went. `problem` is empty for a boot that ran to its end."""

    name: str
    tp: int  # ranks that it should have
    problem: str = ""
    seconds_to_ready: float | None = None
    seconds: float = 0.0
    cpu_s: float = 0.0  # of all ranks together
    version: str = ""
    stages: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    ranks: dict[int, list[dict[str, Any]]] = field(default_factory=dict[int, list[dict[str, Any]]])
    collectives: dict[str, float] = field(default_factory=dict[str, float])
    boot_report: dict[str, Any] | None = None
    fired: dict[str, list[int]] = field(default_factory=dict[str, list[int]])  # adapter -> how often, by rank
    log: str = ""
    stand_ins: list[str] | None = None  # on GPUs: the names of those in use; None: the list for CPU processes
    absent: list[str] = field(default_factory=list[str])


@dataclass
class Comparison:
    """Whether tokens and logits bytes are equal, and where they first are not. `problems` decide the verdict.

    `logits_equal` is over every forward, `prefill_equal` over the target's prefill forwards.
    """

    tokens_equal: bool
    logits_equal: bool
    prefill_equal: bool
    forwards: int
    largest_difference: float
    exact: bool
    problems: list[str]


def compare(stock: Outcome, other: Outcome, exact: bool = True) -> Comparison:
    """Every prompt's tokens, every forward's logits on every rank. Both outcomes must have run to their end.

    Without `exact`, drafts may differ, and with them the batches: then the greedy tokens must be equal, sampled prompts
    must have as many, and the logits bytes of the target's prefill forwards must be equal, which come before any draft.
    """
    problems = [*_tokens(stock, other, exact), *_ranks_agree(other)]
    tokens_equal = not any(p.startswith("tokens") for p in problems)
    ours, theirs = stock.ranks.get(0, []), other.ranks.get(0, [])
    forwards, largest, different = _logits(ours, theirs)
    _, _, prefill = _logits(_prefill(ours), _prefill(theirs))
    if different if exact else prefill:
        problems.append(different if exact else f"in prefill: {prefill}")
    return Comparison(tokens_equal, not different, not prefill, forwards, largest, exact, problems)


def _prefill(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [entry for entry in entries if entry["mode"] == "EXTEND" and not entry["draft"]]


def _tokens(stock: Outcome, other: Outcome, exact: bool) -> list[str]:
    out: list[str] = []
    for ours, theirs in zip(stock.stages, other.stages, strict=True):
        for number, (a, b) in enumerate(zip(ours["tokens"], theirs["tokens"], strict=True)):
            free = ours["sampled"] and not exact
            if a != b and (not free or len(a) != len(b)):
                at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
                said = f"{_at(a, at)} there, {_at(b, at)} here"
                out.append(f"tokens differ: {ours['name']}, prompt {number}, token {at}: {said}")
        if ours["cached"] != theirs["cached"]:
            out.append(f"cached rows differ: {ours['name']}: {ours['cached']} there, {theirs['cached']} here")
    return out


def _at(tokens: Sequence[int], index: int) -> str:
    return str(tokens[index]) if index < len(tokens) else "nothing"


def _ranks_agree(outcome: Outcome) -> list[str]:
    """All ranks gather the same logits: a rank that recorded other bytes has gone its own way."""
    first = outcome.ranks.get(0, [])
    out: list[str] = []
    for rank, entries in sorted(outcome.ranks.items()):
        for index, (a, b) in enumerate(zip(first, entries, strict=False)):
            if a["logits"] != b["logits"]:
                out.append(f"logits of rank {rank} differ from rank 0's at forward {index} ({b['mode']})")
                break
        else:
            if len(entries) != len(first):
                out.append(f"rank {rank} made {len(entries)} forwards, rank 0 {len(first)}")
    return out


def _logits(ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]]) -> tuple[int, float, str]:
    """(forwards compared, largest difference of the two largest logits, first difference in words or "")."""
    largest, different = 0.0, ""
    for index, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if _shape(a) != _shape(b):
            return index, largest, different or f"the batches differ at forward {index}: {_shape(a)} and {_shape(b)}"
        for row, (x, y) in enumerate(zip(a["logits"], b["logits"], strict=True)):
            if x != y:
                gap = max(abs(p - q) for p, q in zip(a["top"][row][1:], b["top"][row][1:], strict=True))
                largest = max(largest, gap)
                where = f"forward {index} ({a['mode']}, {a['rows']} rows), row {row}"
                different = different or f"logits bytes differ first at {where}"
    if len(ours) != len(theirs):
        different = different or f"{len(ours)} forwards there, {len(theirs)} here"
    return min(len(ours), len(theirs)), largest, different


def _shape(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    return entry["mode"], entry["draft"], entry["rows"], entry["requests"]
