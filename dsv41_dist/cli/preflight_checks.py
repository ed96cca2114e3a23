"""What `preflight` checks of the communication layer: ranks, the collectives of V4.1 at TP4, agreement, the drill."""

from __future__ import annotations

from typing import Any

import torch

from ..comm import DisagreementError, MismatchError, TileSplit
from ..comm import reference as meaning
from ..comm.patterns import wrong_elements
from .checks import Context, Result, check
from .environment import rank_facts
from .ops import OPERATIONS, Case
from .timing import summarise, time_calls

#: Facts that may differ between ranks without harm.
_OWN = ("host", "pid")
#: (what, op, rows, columns, iterations): bf16 shapes of DeepSeek-V4.1-Flash at TP4, see the README.
PROFILE = (
    ("decode all-reduce", "all_reduce", 6, 5120, 20),
    ("split columns, 6 rows", "all_gather_columns", 6, 1792, 20),
    ("split columns, 96 rows", "all_gather_columns", 96, 1792, 20),
    ("logits gather", "logits", 6, 32320, 20),
    ("prefill all-gather", "prefill_gather", 4096, 5120, 5),
    ("prefill reduce-scatter", "prefill_scatter", 4096, 5120, 5),
    ("vote", "agree", 1, 1, 20),
)


@check("ranks", "Ranks")
def ranks_check(context: Context) -> Result:
    """A table of every rank's facts; a difference that matters is a refusal naming the ranks."""
    facts = rank_facts(context.device, context.settings, context.transport)
    everyone: list[dict[str, str]] = context.comm.agreement.gather(facts, label="preflight:ranks")
    result = Result(columns=["rank", *facts], rows=[[str(r), *said.values()] for r, said in enumerate(everyone)])
    for name in facts:
        said = {rank: entry[name] for rank, entry in enumerate(everyone)}
        if name not in _OWN and len(set(said.values())) > 1:
            result.reasons.append(str(DisagreementError(name, said, "ranks differ")))
    result.data = {"ranks": everyone}
    return result


@check("collectives", "Collectives at the shapes of V4.1, TP4 (bf16)")
def collectives_check(context: Context) -> Result:
    """Every collective byte by byte against its exact result, with its route and its time."""
    comm, world = context.comm, context.ranks.size
    result = Result(columns=["what", "op", "shape", "route", "p50 us", "p99 us", "#wrong"])
    timed: list[dict[str, Any]] = []
    for what, op, rows, columns, iterations in PROFILE:
        ready, shape, op, route = _profile_case(context, op, rows, columns)
        if ready is None:
            result.rows.append([what, op, shape, "-", "-", "-", route])
            continue
        times, wrong = time_calls(comm, ready, iterations, 2, 0)
        said = comm.agreement.gather({"times": times, "wrong": wrong}, label="preflight:times")
        summary = summarise([entry["times"] for entry in said])
        wrong = sum(entry["wrong"] for entry in said)
        bad = [str(rank) for rank, entry in enumerate(said) if entry["wrong"]]
        result.rows.append([what, op, shape, route, f"{summary['p50_us']:.1f}", f"{summary['p99_us']:.1f}", str(wrong)])
        timed.append(
            {"what": what, "op": op, "shape": shape, "route": route, "world": world, "wrong": wrong, **summary}
        )
        if wrong:
            result.reasons.append(f"{what} ({op} {shape}): {wrong} wrong elements, on rank {', '.join(bad)}")
    wrong = _real_sums(context)
    if wrong is not None:
        route = comm.transports[comm.table.fallback].name
        result.rows.append(["one-shot sum of real data", "all_reduce", "[6, 5120]", route, "-", "-", str(wrong)])
        if wrong:
            result.reasons.append(f"one-shot sum: {wrong} elements are not rank order, fp32, rounded once")
    result.data = {"collectives": timed}
    return result


def _profile_case(context: Context, op: str, rows: int, columns: int) -> tuple[Any, str, str, str]:
    """(ready or None, shape, op, route or why not) for one line of the profile."""
    comm, world = context.comm, context.ranks.size
    shape = f"[{rows}, {columns}]"
    if op == "agree":
        return OPERATIONS[op].ready(comm, Case(op, 1, 1, "int64", "none", world)), "1 int", op, "control"
    if op == "logits":
        from .ops import gather_ready

        case = Case("all_gather", rows, columns, "bfloat16", "none", world)
        return gather_ready(comm, case, 1), f"{shape} per rank, dim -1", "all_gather", _route(context, "all_gather")
    if op.startswith("prefill"):
        name = "all_gather" if op == "prefill_gather" else "reduce_scatter"
        if rows % world:
            return None, shape, name, f"{rows} rows do not divide over {world} ranks"
        case = Case(name, rows // world, columns, "bfloat16", "sum", world)
        return OPERATIONS[name].ready(comm, case), shape, name, _route(context, name)
    case = Case(op, rows, columns, "bfloat16", "sum", world)
    if op == "all_gather_columns":
        split = TileSplit.plan(columns, 128, world)
        if not split:
            return None, shape, op, str(split)
        shape += " " + "/".join(str(tiles) for tiles in split.tiles)
    return OPERATIONS[op].ready(comm, case), shape, op, _route(context, op)


def _route(context: Context, op: str) -> str:
    return context.comm.table.candidates(op, 0)[0]


def _real_sums(context: Context) -> int | None:
    """Where the route is one-shot its bits are fixed for any data: compare random values with the reference."""
    transport = context.comm.transports[_route(context, "all_reduce")]
    if not transport.one_shot:
        return None
    shards = [
        torch.randn((6, 5120), generator=torch.Generator().manual_seed(rank)).to(torch.bfloat16)
        for rank in range(context.ranks.size)
    ]
    mine = shards[context.ranks.rank].to(context.ranks.device)
    got = context.comm.all_reduce(mine, label="preflight:real_sum").cpu()
    found = wrong_elements(got, meaning.all_reduce(shards))
    return sum(context.comm.agreement.gather(found, label="preflight:real_sums"))


@check("agreement", "Agreement")
def agreement_check(context: Context) -> Result:
    """One rank says no: all say no. One rank differs: all raise. Calls differ: all raise and nothing moves."""
    comm, rank, last = context.comm, context.ranks.rank, context.ranks.size - 1
    result = Result(columns=["what", "outcome on every rank"])
    alone = context.ranks.size == 1

    def record(what: str, outcome: str, expected: str) -> None:
        said = comm.agreement.gather(outcome, label="preflight:outcome")
        result.rows.append([what, outcome if len(set(said)) == 1 else "; ".join(said)])
        if set(said) != {expected}:
            result.reasons.append(f"{what}: expected {expected!r} on every rank, got {dict(enumerate(said))}")

    record("every rank says yes", str(comm.agreement.agree(True, label="preflight:yes")), "True")
    answer = comm.agreement.agree(rank != last, label="preflight:no")
    record(f"rank {last} says no", str(answer), "False")
    outcome = "no error"
    try:
        comm.agreement.same_everywhere({"answer": "a" if rank != last or alone else "b"}, label="preflight:same")
    except DisagreementError as error:
        outcome = f"DisagreementError naming rank {_minority(error)}"
    record(f"rank {last} has another value", outcome, "no error" if alone else f"DisagreementError naming rank {last}")
    outcome = "no error"
    try:
        comm.check_call("all_reduce", "preflight:swap" if rank != last or alone else "preflight:other")
    except MismatchError as error:
        outcome = f"MismatchError in {', '.join(error.fields)} naming rank {_minority(error)}"
    expected = "no error" if alone else f"MismatchError in label naming rank {last}"
    record(f"rank {last} makes another call", outcome, expected)
    x = torch.full((3,), float(rank), device=context.ranks.device)
    total = comm.all_reduce(x, label="preflight:after")
    fine = bool((total == float(sum(range(last + 1)))).all())
    record("the group afterwards", "all-reduce right" if fine else "all-reduce WRONG", "all-reduce right")
    return result


def _minority(error: DisagreementError) -> str:
    """The rank that said what only it said; in a group of two the last one."""
    said = {rank: str(answer) for rank, answer in error.said.items()}
    counts = {answer: list(said.values()).count(answer) for answer in said.values()}
    alone = [rank for rank, answer in said.items() if counts[answer] == 1]
    return str(alone[-1]) if alone else "?"


@check("drill", "Drill: a rank is stopped, a rank is killed", wanted=lambda context: bool(context.options.get("drill")))
def drill_check(context: Context) -> Result:
    """Spare rank sets on rank 0's machine lose a rank; the others must name it, and nobody may be left waiting."""
    from .drill import run_drill

    result = Result(columns=["what", "named by", "as", "after s", "bound s"])
    found: Any = run_drill() if context.ranks.rank == 0 else None
    found = context.comm.agreement.gather(found, label="preflight:drill")[0]
    for drill in found:
        result.rows.append([str(drill[name]) for name in ("what", "named_by", "named", "seconds", "bound")])
        if drill["reason"]:
            result.reasons.append(f"drill {drill['what']}: {drill['reason']}")
    result.data = {"drill": found}
    return result
