"""Compares what two boots produced. Pure data: what the ranks recorded and what the engine answered."""

from __future__ import annotations

import math
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

    `logits_equal` is over every forward (of a draft that has no logits: its hidden states), `prefill_equal` over the
    target's prefill forwards. `tokens_equal` without `exact`: sampled prompts have as many tokens, not the same ones.
    `forwards` counts those with bytes that were compared.
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
    boots = [stock] if other is stock else [stock, other]
    problems = [f"{boot.name}: {problem}" for boot in boots for problem in (*_lacks(boot), *_ranks_agree(boot))]
    problems += _tokens(stock, other, exact)
    tokens_equal = not any(p.startswith("tokens") for p in problems)
    ours, theirs = stock.ranks.get(0, []), other.ranks.get(0, [])
    forwards, largest, different = _logits(ours, theirs)
    _, _, prefill = _logits(_prefill(ours), _prefill(theirs))
    if different if exact else prefill:
        problems.append(different if exact else f"in prefill: {prefill}")
    return Comparison(tokens_equal, not different, not prefill, forwards, largest, exact, problems)


def _prefill(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [entry for entry in entries if entry["mode"] == "EXTEND" and not entry["draft"]]


def _lacks(outcome: Outcome) -> list[str]:
    """What a boot must have recorded, or nothing of it could differ."""
    out: list[str] = []
    if sorted(outcome.ranks) != list(range(outcome.tp)):
        there = ", ".join(map(str, sorted(outcome.ranks))) or "none"
        out.append(f"TP{outcome.tp}, and the ranks that recorded forwards are {there}")
    if not any(entry["logits"] for entry in _prefill(outcome.ranks.get(0, []))):
        out.append("no prefill was recorded")
    if not outcome.stages:
        out.append("no request was answered")
    for stage in outcome.stages:
        wanted = stage["new_tokens"]
        for number, tokens in enumerate(stage["tokens"]):
            if len(tokens) != wanted:
                out.append(f"{stage['name']}, prompt {number}: {len(tokens)} tokens of {wanted}")
    for rank, entries in sorted(outcome.ranks.items()):
        for index, entry in enumerate(entries):
            if not all(math.isfinite(value) for top in entry["top"] for value in top):
                out.append(f"rank {rank} has NaN or infinity at forward {index} ({entry['mode']})")
                break
    return out


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
    """All ranks end a forward with the same bytes: a rank that recorded others has gone its own way."""
    first = outcome.ranks.get(0, [])
    out: list[str] = []
    for rank, entries in sorted(outcome.ranks.items()):
        for index, (a, b) in enumerate(zip(first, entries, strict=False)):
            if a["logits"] != b["logits"]:
                out.append(f"rank {rank}'s {_bytes(b)} differ from rank 0's at forward {index} ({b['mode']})")
                break
        else:
            if len(entries) != len(first):
                out.append(f"rank {rank} made {len(entries)} forwards, rank 0 {len(first)}")
    return out


def _logits(ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]]) -> tuple[int, float, str]:
    """(forwards compared, largest difference of the two largest values of a row, first difference in words or "")."""
    compared, largest, different = 0, 0.0, ""
    for index, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if _shape(a) != _shape(b):
            return compared, largest, different or f"the batches differ at forward {index}: {_shape(a)} and {_shape(b)}"
        compared += bool(a["logits"])
        for row, (x, y) in enumerate(zip(a["logits"], b["logits"], strict=True)):
            if x != y:
                gap = max(abs(p - q) for p, q in zip(a["top"][row][1:], b["top"][row][1:], strict=True))
                largest = max(largest, math.inf if math.isnan(gap) else gap)
                where = f"forward {index} ({a['mode']}, {a['rows']} rows), row {row}"
                different = different or f"{_bytes(a)} differ first at {where}"
    if len(ours) != len(theirs):
        different = different or f"{len(ours)} forwards there, {len(theirs)} here"
    return compared, largest, different


def _bytes(entry: Mapping[str, Any]) -> str:
    return "bytes of the draft's hidden states" if entry["draft"] else "logits bytes"


def _shape(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    return entry["mode"], entry["draft"], entry["rows"], entry["requests"], len(entry["logits"])
