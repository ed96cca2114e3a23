"""The rehearsal's report: plain text for people, the same content as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from .gate_sets import cannot_fire
from .stand_ins import ON_GPU, STAND_INS, StandIn
from .verdict import Comparison, Outcome

__all__ = ["as_json", "judge", "text"]


def judge(
    outcomes: Sequence[Outcome],
    comparison: Comparison | None,
    wanted: Iterable[str],
    must_fire: bool,
    device: str = "cpu",
    graphs: bool = False,
) -> tuple[list[str], list[str]]:
    """(problems, notes). Any problem means NOT READY. `wanted`: adapters whose gates are set."""
    problems = [f"{outcome.name}: {outcome.problem}" for outcome in outcomes if outcome.problem]
    notes: list[str] = []
    if comparison is not None:
        problems += comparison.problems
    adapted = next((outcome for outcome in outcomes if outcome.name == "adapted"), None)
    if adapted is None or adapted.problem:
        return problems, notes
    entries = {entry["adapter"]: entry for entry in (adapted.boot_report or {}).get("adapters", [])}
    for name in wanted:
        state = entries.get(name, {}).get("state", "not in the boot report")
        counts = adapted.fired.get(name, [])
        why = cannot_fire(name, device, graphs)
        if state == "native" or (counts and all(counts)):
            continue
        if any(counts):
            ranks = ", ".join(str(rank) for rank, count in enumerate(counts) if not count)
            problems.append(f"{name} fired on some ranks only: never on rank {ranks}")
        elif state not in ("fired", "installed", "never fired"):
            problems.append(f"{name}: {state}")
        elif why:
            notes.append(f"{name} is installed and cannot fire here: {why}")
        else:
            (problems if must_fire else notes).append(f"{name} was installed and never fired in these requests")
    return problems, notes


def text(
    outcomes: Sequence[Outcome],
    comparison: Comparison | None,
    problems: Sequence[str],
    notes: Sequence[str],
    header: str,
    seconds: float,
) -> str:
    """Everything that was found, and the verdict as the last line."""
    parts = [header, "", _table(_boots(outcomes))]
    if comparison is not None:
        same = {True: "equal", False: "DIFFERENT"}
        ours = f"equal in {comparison.forwards} forwards"
        if not comparison.logits_equal:
            ours = (
                f"DIFFERENT; the two largest of a row by up to {comparison.largest_difference:g}"
                if comparison.exact
                else "not compared: drafts may differ, and with them the batches"
            )
        answers = same[comparison.tokens_equal]
        if comparison.tokens_equal and not comparison.exact:
            answers += " (greedy; sampled: same count only)"
        parts += [
            "",
            "Stock against adapted:",
            f"  tokens                  {answers}",
            f"  logits bytes, prefill   {same[comparison.prefill_equal]}",
            f"  logits bytes, all       {ours}",
        ]
    for outcome in outcomes:
        if outcome.boot_report:
            parts += ["", f"Boot report ({outcome.boot_report['ranks']} ranks agree):", _table(_adapters(outcome))]
            parts += _notes(outcome)
        if outcome.collectives:
            calls = ", ".join(f"{count:.1f} {call}" for call, count in sorted(outcome.collectives.items()))
            parts += ["", f"Collectives per forward, {outcome.name}, as the engine calls them: {calls}"]
    rows = [("stand-in", "instead of"), *((item.name, item.real) for item in stand_ins(outcomes))]
    absent = next((outcome.absent for outcome in outcomes if outcome.absent), [])
    if absent:
        parts += ["", f"Packages that do not load on this machine: {', '.join(absent)}"]
    parts += ["", "Not the real kernels here (docs/rehearsal.md says what each was checked against):", _table(rows)]
    parts += ["", *(f"note: {note}" for note in notes), *(f"- {problem}" for problem in problems)]
    verdict = "NOT READY" if problems else "READY"
    return "\n".join([*parts, f"{verdict}: {len(outcomes)} boot(s), {seconds:.0f} s"])


def as_json(
    outcomes: Sequence[Outcome],
    comparison: Comparison | None,
    problems: Sequence[str],
    notes: Sequence[str],
    seconds: float,
    header: str = "",
    environment: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The same as data, without the per-row digests."""
    boots = [{**asdict(outcome), "ranks": {r: len(f) for r, f in outcome.ranks.items()}} for outcome in outcomes]
    return {
        "ready": not problems,
        "command": header,
        "environment": None if environment is None else dict(environment),
        "seconds": round(seconds, 1),
        "problems": list(problems),
        "notes": list(notes),
        "boots": boots,
        "comparison": None if comparison is None else asdict(comparison),
        "stand_ins": [asdict(item) for item in stand_ins(outcomes)],
    }


def stand_ins(outcomes: Sequence[Outcome]) -> list[StandIn]:
    """Those in use in these boots."""
    used = next((outcome.stand_ins for outcome in outcomes if outcome.stand_ins is not None), None)
    return list(STAND_INS) if used is None else [item for item in ON_GPU if item.name in used]


def _boots(outcomes: Sequence[Outcome]) -> list[tuple[str, ...]]:
    head = ("boot", "engine", "ready s", "all s", "cpu s", "ranks", "tokens", "cached rows", "ended")
    rows: list[tuple[str, ...]] = [head]
    for outcome in outcomes:
        rows.append(
            (
                outcome.name,
                outcome.version or "-",
                "-" if outcome.seconds_to_ready is None else f"{outcome.seconds_to_ready:.0f}",
                f"{outcome.seconds:.0f}",
                f"{outcome.cpu_s:.0f}",
                str(len(outcome.ranks)),
                str(sum(len(tokens) for stage in outcome.stages for tokens in stage["tokens"])),
                str(sum(sum(stage["cached"]) for stage in outcome.stages)),
                "by itself" if not outcome.problem else "see below",
            )
        )
    return rows


def _adapters(outcome: Outcome) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("adapter", "state", "guarantee", "patched", "fired on", "times on rank 0")]
    for entry in (outcome.boot_report or {}).get("adapters", []):
        counts = outcome.fired.get(entry["adapter"], [])
        # What the engine does by itself stays its own; the counts are of what is added to it.
        state = "fired" if any(counts) and entry["state"] != "native" else entry["state"]
        # The engine kills its ranks at the end, so the report's own last word is missing.
        state = "never fired" if state == "installed" and not outcome.problem else state
        on = f"{sum(map(bool, counts))} of {len(counts)} ranks"
        rows.append(
            (entry["adapter"], state, entry["guarantee"], str(len(entry["patched"])), on, str(next(iter(counts), 0)))
        )
    return rows


def _notes(outcome: Outcome) -> list[str]:
    """What the adapters say of themselves, gathers by route among it."""
    return [
        f"  {entry['adapter']}: {note}"
        for entry in (outcome.boot_report or {}).get("adapters", [])
        for note in entry.get("notes", [])
    ]


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)
