"""`bench verify`: what token-wise, block and capped verification accept, exactly, and what the kernels cost on a GPU.

One process. The acceptance part enumerates every draft path of synthetic draft/target pairs over a small vocabulary
(verify_laws.py); each line is checked: the emitted law is the target's, the expected length is the closed form's, a
block is never shorter than token by token, a cap never lengthens. The kernel part is verify_kernels.py, and
verify_router.py where the engine can be imported.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from ..comm.errors import ArgumentError
from ..comm.settings import CommSettings
from ..engine.gate_kinds import BadValue, VerifyCap
from .bench import check_files, integer
from .environment import environment
from .layer_run import integers
from .session import choose_device, choose_place
from .verify_report import draw

__all__ = ["VerifyPlan", "plan_verify", "run_verify"]

TOLERANCE = 1e-12
_MOST_PATHS = 2**17


@dataclass(frozen=True)
class VerifyPlan:
    """`caps`: the text and what it means. `requests` empty: the kernels are not timed. `drawn_at` 1: no fault."""

    vocab: int
    drafts: int
    temperatures: tuple[float, ...]
    agreements: tuple[float, ...]
    taus: tuple[float, ...]
    caps: tuple[tuple[str, int | list[float]], ...]
    pairs: int
    drawn_at: float
    device: str
    requests: tuple[int, ...]
    kernel_vocab: int
    iterations: int
    graphs: int
    json_file: str | None
    plot_file: str | None


def plan_verify(
    *,
    vocab: str,
    drafts: str,
    temperatures: str,
    agreements: str,
    taus: str,
    caps: str | None,
    pairs: str,
    drawn_at: str,
    device: str,
    requests: str | None,
    kernel_vocab: str,
    iterations: str,
    graphs: str | None,
    json_file: str | None,
    plot_file: str | None,
) -> VerifyPlan:
    """Check every argument; caps None: 3 or all drafts, and conf:0.5. Raises ArgumentError (exit 2) with one line."""
    place = choose_place(None)
    if place.launcher != "own":
        raise ArgumentError(f"bench verify is one process; {place.launcher} has started {place.size}")
    tokens, depth = integer("--vocab", vocab, 2, 64), integer("--drafts", drafts, 1, 5)
    if tokens**depth > _MOST_PATHS:
        raise ArgumentError(f"--vocab {vocab} with --drafts {drafts}: {tokens**depth} paths, allowed is {_MOST_PATHS}")
    where = choose_device(device)
    sizes = requests if requests is not None else ("1,4,8,16,32,64" if where == "cuda" else "none")
    replays = integer("-G", graphs if graphs is not None else ("30" if where == "cuda" else "0"), 0, 10**6)
    if replays and where != "cuda":
        raise ArgumentError(f"-G {graphs!r}: CUDA graphs need a GPU; allowed on this device is 0")
    check_files(json_file, plot_file)
    chosen = f"{min(3, depth)} conf:0.5" if caps is None else caps
    return VerifyPlan(
        vocab=tokens,
        drafts=depth,
        temperatures=_numbers("--temperature", temperatures, 0.05, 10.0),
        agreements=_numbers("--agreement", agreements, 0.0, 1.0),
        taus=_numbers("--draft-tau", taus, 0.05, 4.0),
        caps=tuple((text, _cap(text, depth)) for text in chosen.split()),
        pairs=integer("--pairs", pairs, 1, 1000),
        drawn_at=_numbers("--drawn-at", drawn_at, 0.05, 4.0)[0],
        device=where,
        requests=() if sizes == "none" else integers("--requests", sizes, 1, 4096),
        kernel_vocab=integer("--kernel-vocab", kernel_vocab, 8, 2**20),
        iterations=integer("-n", iterations, 1, 10**6),
        graphs=replays,
        json_file=json_file,
        plot_file=plot_file,
    )


def _numbers(argument: str, text: str, low: float, high: float) -> tuple[float, ...]:
    out: list[float] = []
    for part in text.split(","):
        try:
            value = float(part)
        except ValueError:
            value = float("nan")
        if not low <= value <= high:
            raise ArgumentError(f"{argument} {part!r}: allowed is a number from {low:g} to {high:g}, or a list a,b")
        out.append(value)
    return tuple(dict.fromkeys(out))


def _cap(text: str, drafts: int) -> int | list[float]:
    kind = VerifyCap()
    try:
        cap = kind.parse(text)
    except BadValue:
        cap = 0
    if not cap or (isinstance(cap, int) and cap > drafts):
        allowed = kind.allowed.removeprefix("0 (off), ")
        raise ArgumentError(f"--caps {text!r}: allowed is {allowed}, at most --drafts {drafts}; several with spaces")
    return cap


def run_verify(plan: VerifyPlan) -> int:
    """Measure, print, write and draw. Returns the exit code: 1 for any line that is wrong."""
    quiet = plan.json_file == "-"

    def say(text: str) -> None:
        if not quiet:
            print(text, flush=True)

    say(
        f"# dsv41_dist bench verify: {plan.pairs} pairs of {plan.vocab} tokens and {plan.drafts} drafts each, "
        f"all {plan.vocab**plan.drafts} draft paths; expected tokens a step (verified rows)"
    )
    names = [name for name, _, _ in _rules(plan)]
    say(f"{'T':>5}{'agree':>7}{'tau':>6}{'overlap':>9}" + "".join(f"{name:>21}" for name in names))
    rows: list[dict[str, Any]] = []
    for temperature in plan.temperatures:
        for agreement in plan.agreements:
            for tau in plan.taus:
                lines = _acceptance(plan, temperature, agreement, tau)
                rows += lines
                cells = "".join(_cell(line) for line in lines)
                say(f"{temperature:>5.2f}{agreement:>7.3f}{tau:>6.2f}{lines[0]['overlap']:>9.3f}{cells}")
    wrong = sum(row["wrong"] for row in rows)
    say(f"# largest difference of an emitted law from the target's: {max(r['law_error'] for r in rows):.1e}")
    if plan.requests:
        from .verify_kernels import HEADER, line_of, time_kernels

        say(HEADER)
        for row in time_kernels(plan):
            rows.append(row)
            wrong += row["wrong"]
            say(line_of(row))
    else:
        say("# kernels: not timed (no GPU, or --requests none)")
    router, lines = _router(plan, say)
    rows += lines
    wrong += sum(line["wrong"] for line in lines)
    results = {"env": environment(1, "own", plan.device, CommSettings.from_env()), "router": router, "rows": rows}
    if quiet:
        print(json.dumps(results, indent=1))
    elif plan.json_file:
        Path(plan.json_file).write_text(json.dumps(results, indent=1) + "\n")
    if plan.plot_file:
        draw(results, plan.plot_file)
    say(f"# {len(rows)} lines, wrong {wrong} {'OK' if not wrong else 'FAILED'}")
    return 1 if wrong else 0


def _router(plan: VerifyPlan, say: Callable[[str], None]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(what was timed, or {"skipped": why}; its lines)."""
    from . import verify_router

    try:
        if not plan.requests:
            raise verify_router.RouterAbsent("no --requests")
        routers = verify_router.engine_routers(plan.device)
    except verify_router.RouterAbsent as absent:
        say(f"# router: skipped, {absent}")
        return {"skipped": str(absent)}, []
    say(f"# router of SGLang {routers.facts['release']}: {verify_router.EXPERTS} experts, top {verify_router.TOP_K}")
    say(verify_router.HEADER)
    lines: list[dict[str, Any]] = []
    for line in verify_router.time_routers(plan, routers):
        lines.append(line)
        say(verify_router.line_of(line))
    return routers.facts, lines


def _cell(row: dict[str, Any]) -> str:
    return f"{row['tokens']:>13.4f} ({row['rows']:.2f})" + ("!" if row["wrong"] else " ")


def _rules(plan: VerifyPlan) -> list[tuple[str, bool, int | list[float] | None]]:
    """(name, block?, cap) of every rule, the uncapped ones first."""
    out: list[tuple[str, bool, int | list[float] | None]] = [("token", False, None), ("block", True, None)]
    for text, cap in plan.caps:
        out += [(f"token cap {text}", False, cap), (f"block cap {text}", True, cap)]
    return out


def _acceptance(plan: VerifyPlan, temperature: float, agreement: float, tau: float) -> list[dict[str, Any]]:
    """One line for each rule: means over the pairs, the largest error, and how many pairs were wrong."""
    from .verify_laws import closed_form, make_pair, outcome, rule_of, verified_drafts

    seen: dict[str, list[tuple[float, float, float, float, int]]] = {name: [] for name, _, _ in _rules(plan)}
    overlaps: list[float] = []
    for seed in range(plan.pairs):
        pair = make_pair(plan.vocab, plan.drafts, agreement, temperature, tau, seed=seed, drawn_at=plan.drawn_at)
        overlaps.append(pair.overlap)
        uncapped: dict[bool, float] = {}
        for name, block, cap in _rules(plan):
            lengths = None if cap is None else verified_drafts(pair, cap)
            rule = rule_of(pair, block, lengths)
            error, expected = outcome(pair, rule)
            formula = closed_form(pair, rule)
            live = plan.drafts if lengths is None else float((pair.drawn * lengths).sum())
            bad = error > TOLERANCE or abs(expected - formula) > TOLERANCE * plan.drafts
            if cap is None:
                uncapped[block] = expected
                bad = bad or expected < uncapped[False] - TOLERANCE
            else:
                bad = bad or expected > uncapped[block] + TOLERANCE
            seen[name].append((expected, formula, error, live + 1, int(bad)))
    lines: list[dict[str, Any]] = []
    for name, block, cap in _rules(plan):
        found = seen[name]
        tokens, rows = fmean(f[0] for f in found), fmean(f[3] for f in found)
        line: dict[str, Any] = {
            "op": "verify", "rule": "block" if block else "token", "cap": None if cap is None else name.split()[-1],
            "temperature": temperature, "agreement": agreement, "tau": tau, "overlap": round(fmean(overlaps), 6),
            "tokens": round(tokens, 9), "closed_form": round(fmean(f[1] for f in found), 9),
            "accepted_share": round((tokens - 1) / plan.drafts, 6), "rows": round(rows, 6),
            "tokens_per_row": round(tokens / rows, 6), "law_error": max(f[2] for f in found),
            "pairs": plan.pairs, "wrong": sum(f[4] for f in found),
        }  # fmt: skip
        lines.append(line)
    return lines
