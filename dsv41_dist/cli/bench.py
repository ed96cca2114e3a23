"""`bench`: the collectives in isolation, in nccl-tests' vocabulary, correctness on by default."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..comm.errors import ArgumentError
from ..comm.transports.base import REDUCE_OPS
from .ops import DTYPES, OPERATIONS, Case, check_case
from .routes import RoutesPlan
from .session import Place, choose_device, choose_place, choose_transport

__all__ = ["BenchPlan", "check_files", "flipped_rank", "integer", "parse_size", "plan_bench"]

MIN_RATIO = 0.9
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


@dataclass(frozen=True)
class BenchPlan:
    """Everything a rank needs to run the benchmark; checked before any rank is started or joined."""

    cases: tuple[Case, ...]
    launcher: str
    device: str
    transport: str
    iterations: int
    warmup: int
    check: int
    graphs: int
    json_file: str | None
    plot_file: str | None
    baseline: str | None
    flip: int | None


def parse_size(argument: str, text: str) -> int:
    """8, 64K, 1.5M, 2G (binary) -> bytes. Raises ArgumentError naming the argument."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGkmg]?)(?:i?[bB])?", text.strip())
    size = int(float(match[1]) * _UNITS[match[2].upper()]) if match else 0
    if not match or not 1 <= size <= 2**36:
        raise ArgumentError(f"{argument} {text!r}: allowed is a number of bytes from 1 to 64G, such as 8, 64K, 1M, 2G")
    return size


def plan_bench(
    ops: Sequence[str],
    *,
    ranks: int | None,
    min_bytes: str,
    max_bytes: str,
    factor: str,
    iterations: str,
    warmup: str,
    dtype: str,
    redop: str,
    check: str,
    graphs: str,
    tokens: str | None,
    hidden: str,
    transport: str,
    device: str,
    json_file: str | None,
    plot_file: str | None,
    baseline: str | None,
    flip: str | None = None,
) -> tuple[BenchPlan, Place]:
    """Check every argument. Raises ArgumentError (exit 2) with one line; starts and joins nothing."""
    for op in ops:
        if op not in OPERATIONS:
            raise ArgumentError(f"OP {op!r}: allowed is {', '.join(OPERATIONS)}")
    # seqpar is a comparison: its other side is run with it.
    ops = [name for op in ops for name in ((op, "seqpar_reference") if op == "seqpar" else (op,))]
    dtypes = _names("--dtype", dtype, list(DTYPES), ["bfloat16", "half", "float", "int32"])
    redops = _names("--redop", redop, list(REDUCE_OPS), list(REDUCE_OPS))
    place = choose_place(ranks)
    where = choose_device(device)
    carrier = choose_transport(transport, place.launcher, where)
    columns = integer("--hidden", hidden, 1, 2**24)
    sizes = _sizes(min_bytes, max_bytes, factor)
    rows = None if tokens is None else [integer("--tokens", t, 1, 2**24) for t in tokens.split(",")]
    cases: list[Case] = []
    for op in ops:
        operation = OPERATIONS[op]
        for name in dtypes:
            item = Case(op, 1, 1, name, "sum", place.size).item
            for red in _reductions(op, redops):
                if op == "agree":
                    shapes = [(1, 1)]
                elif rows is not None:
                    shapes = [(row, columns) for row in rows]
                else:
                    shapes = [operation.shape(size, item, place.size, columns) for size in sizes]
                cases += [Case(op, r, c, name, red, place.size) for r, c in dict.fromkeys(shapes)]
    if dtype == "all":
        cases = [case for case in cases if OPERATIONS[case.op].takes_dtype(case.torch_dtype)]
    for case in cases:
        check_case(case)
    launches = integer("-G", graphs, 0, 10**6)
    if launches and where != "cuda":
        raise ArgumentError(f"-G {graphs!r}: CUDA graphs need a GPU; allowed on this device is 0")
    if launches and any(case.op == "agree" for case in cases):
        raise ArgumentError(f"-G {graphs!r}: agree is a host operation and cannot be captured; leave it out")
    check_files(json_file, plot_file)
    if baseline is not None:
        read_baseline(baseline, place.size, where)
    looks = integer("-c", check, 0, 1)
    culprit = flipped_rank(flip, place.size, looks)
    for case in cases if culprit is not None else ():
        _refuse_unseen_flip(case, culprit)
    plan = BenchPlan(
        cases=tuple(cases),
        launcher=place.launcher,
        device=where,
        transport=carrier,
        iterations=integer("-n", iterations, 1, 10**6),
        warmup=integer("-w", warmup, 0, 10**6),
        check=looks,
        graphs=launches,
        json_file=json_file,
        plot_file=plot_file,
        baseline=baseline,
        flip=culprit,
    )
    return plan, place


def plan_routes(
    *,
    ranks: int | None,
    min_bytes: str,
    max_bytes: str,
    factor: str,
    transport: str,
    device: str,
    json_file: str | None,
) -> tuple[RoutesPlan, Place]:
    """Check the arguments of `bench --routes`, as `plan_bench` does."""
    place = choose_place(ranks)
    where = choose_device(device)
    carrier = choose_transport(transport, place.launcher, where)
    beyond = ("peer",) if transport == "auto" and where == "cuda" else (carrier,)
    if json_file == "-":
        raise ArgumentError(
            "--json '-': with --routes allowed is a file name; the routes are printed as a table anyway"
        )
    check_files(json_file, None)
    return RoutesPlan(place.launcher, where, beyond, _sizes(min_bytes, max_bytes, factor), json_file), place


def check_files(json_file: str | None, plot_file: str | None) -> None:
    """Raise ArgumentError for a file that cannot be written, before anything is measured for it."""
    if plot_file is not None:
        if Path(plot_file).suffix.lower() not in (".png", ".svg"):
            raise ArgumentError(f"--plot {plot_file!r}: allowed is a file name ending in .png or .svg")
        if importlib.util.find_spec("matplotlib") is None:
            raise ArgumentError(f"--plot {plot_file!r}: matplotlib is missing: pip install 'dsv41-dist[plots]'")
    for argument, file in (("--json", json_file), ("--plot", plot_file)):
        if file is not None and file != "-" and not Path(file).resolve().parent.is_dir():
            raise ArgumentError(f"{argument} {file!r}: its folder does not exist")
        if file is not None and file != "-" and Path(file).is_dir():
            raise ArgumentError(f"{argument} {file!r}: it is a folder; name a file in it")


def flipped_rank(text: str | None, world: int, check: int) -> int | None:
    """--flip-byte as a rank. Raises ArgumentError; also when nothing is checked, as none could find the byte."""
    if text is None:
        return None
    rank = integer("--flip-byte", text, 0, world - 1)
    if not check:
        raise ArgumentError(f"--flip-byte {text!r} with -c 0: nothing looks for the wrong byte; leave -c out")
    return rank


def _refuse_unseen_flip(case: Case, culprit: int) -> None:
    """A flip shows that the check finds it: refused where the result may be right all the same."""
    why = None
    if case.op == "agree":
        why = "agree: it sends no payload; leave it out"
    elif case.op == "broadcast" and culprit != 0:
        why = "broadcast: only rank 0's bytes are sent; name rank 0"
    elif case.redop in ("min", "max"):
        why = f"{case.op} -o {case.redop}: another rank's value may hide it; allowed is sum, prod"
    if why:
        raise ArgumentError(f"--flip-byte '{culprit}' with {why}")


def read_baseline(file: str, world: int, device: str) -> dict[str, Any]:
    """The results to compare with. Raises ArgumentError when they are none, or of another number of ranks or device."""
    content = read_results("--baseline", file)
    for index, row in enumerate(content["rows"]):
        p50 = row.get("p50_us") if isinstance(row, dict) else None
        if not isinstance(p50, int | float) or not p50 > 0:
            raise ArgumentError(
                f'--baseline {file!r}: row {index} has no "p50_us" above 0; allowed is a file that bench --json wrote'
            )
    env = content.get("env")
    there = (env.get("world_size"), env.get("device")) if isinstance(env, dict) else (None, None)
    if there != (world, device):
        raise ArgumentError(
            f"--baseline {file!r}: it was measured on {there[0]} ranks, {there[1]}; this run is on {world} ranks, "
            f"{device}; take a baseline of the same"
        )
    return content


def read_results(argument: str, file: str) -> dict[str, Any]:
    """A results JSON of this project. Raises ArgumentError naming the argument when it cannot be read as one."""
    try:
        content = json.loads(Path(file).read_text())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not JSON"
        raise ArgumentError(f"{argument} {file!r}: {reason}; allowed is a file that bench --json wrote") from None
    if not isinstance(content, dict) or not isinstance(content.get("rows"), list) or not content["rows"]:
        raise ArgumentError(f'{argument} {file!r}: it has no "rows"; allowed is a file that bench --json wrote')
    return content


def compare_with_baseline(rows: Sequence[dict[str, Any]], baseline: dict[str, Any]) -> list[str]:
    """The lines of this run that are below 0.9 times the baseline's speed, as text; empty is a pass.

    Lines are matched by op, bytes, dtype, redop, transport and graph; ranks and device are those of the run, see
    `read_baseline`. None in common is a failure too.
    """
    known = {_key(row): row for row in baseline["rows"]}
    common = [(row, known[_key(row)]) for row in rows if _key(row) in known]
    if not common:
        return ["no line of this run is in the baseline"]
    slow: list[str] = []
    for now, then in common:
        ratio = then["p50_us"] / now["p50_us"]
        if ratio < MIN_RATIO:
            slow.append(
                f"{now['op']} {now['bytes']} B {now['dtype']}: p50 {now['p50_us']:.1f} us against "
                f"{then['p50_us']:.1f} us, {ratio:.2f} of the baseline's speed (at least {MIN_RATIO})"
            )
    return slow


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in ("op", "bytes", "dtype", "redop", "transport", "graph"))


def _sizes(min_bytes: str, max_bytes: str, factor: str) -> tuple[int, ...]:
    low, high = parse_size("-b", min_bytes), parse_size("-e", max_bytes)
    if low > high:
        raise ArgumentError(f"-b {min_bytes!r}: it must not be above -e {max_bytes!r}")
    step = _number("-f", factor)
    return tuple(int(low * step**k) for k in range(int(math.log(high / low, step) + 1e-9) + 1))


def _reductions(op: str, redops: list[str]) -> list[str]:
    if not OPERATIONS[op].reduces:
        return ["none"]
    return ["sum"] if op.startswith("seqpar") else redops


def _names(argument: str, text: str, allowed: list[str], everything: list[str]) -> list[str]:
    names = everything if text == "all" else text.split(",")
    for name in names:
        if name not in allowed:
            raise ArgumentError(f"{argument} {name!r}: allowed is all, {', '.join(allowed)}")
    return names


def integer(argument: str, text: str, low: int, high: int) -> int:
    """A whole number within bounds. Raises ArgumentError naming the argument."""
    value = None
    with contextlib.suppress(ValueError):
        value = int(text)
    if value is None or not low <= value <= high:
        raise ArgumentError(f"{argument} {text!r}: allowed is an integer from {low} to {high}")
    return value


def _number(argument: str, text: str) -> float:
    value = 0.0
    with contextlib.suppress(ValueError):
        value = float(text)
    if not 1.01 <= value <= 1024:
        raise ArgumentError(f"{argument} {text!r}: allowed is a step factor from 1.01 to 1024")
    return value
