"""The part of `bench` that runs on every rank, and what rank 0 prints, writes and draws."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from ..comm.settings import CommSettings
from .bench import BenchPlan, compare_with_baseline, read_baseline
from .environment import environment
from .ops import OPERATIONS, Case, dtype_name

__all__ = ["draw", "run_bench"]

_HEADER = (
    f"{'op':<19}{'size':>12}{'count':>12}{'type':>10}{'redop':>7}{'time':>11}{'algbw':>8}{'busbw':>8}{'#wrong':>8}"
    f"{'p50':>11}{'p99':>11}{'cv%':>7}{'slowest':>9}"
)
_UNITS = (
    f"{'':<19}{'(B)':>12}{'(elements)':>12}{'':>10}{'':>7}{'(us)':>11}{'(GB/s)':>8}{'(GB/s)':>8}{'':>8}"
    f"{'(us)':>11}{'(us)':>11}{'':>7}{'(rank)':>9}"
)


def run_bench(rank: int, size: int, plan: BenchPlan) -> int:
    """Join, run every case, and on rank 0 report. Returns the exit code, the same on every rank."""
    from ..comm import Communicator
    from .session import join

    settings = CommSettings.from_env()
    ranks = join(plan.launcher, plan.device, plan.transport, settings)
    comm = Communicator.create(ranks, [plan.transport], settings=settings)
    _refuse_missing_transport(comm, plan.transport)
    if plan.flip is not None:
        from ..comm.transports.flipped import FlippedTransport

        comm.transports = {n: FlippedTransport(t, plan.flip) for n, t in comm.transports.items()}
    printer = Printer(plan, size) if rank == 0 else None
    rows: list[dict[str, Any]] = []
    for index, case in enumerate(plan.cases):
        if printer:
            printer.begin(index, case)
        row = _run_case(comm, plan, case)
        if row is not None:
            rows.append(row)
        if printer and row is not None:
            printer.row(row)
    code = 0
    if printer:
        code = printer.finish(rows, environment(size, plan.launcher, plan.device, settings))
    code = -comm.agreement.agree_min(-code, label="bench:exit")
    comm.close()
    return code


def _refuse_missing_transport(comm: Any, transport: str) -> None:
    from ..comm import TransportUnavailable

    if transport not in comm.transports:
        raise TransportUnavailable(transport, "it did not connect on every rank (the warning above says why)")


def _run_case(comm: Any, plan: BenchPlan, case: Case) -> dict[str, Any] | None:
    """One line; None on ranks other than 0. The wrong elements of all ranks are added up."""
    from .timing import summarise, time_calls

    operation = OPERATIONS[case.op]
    ready = operation.ready(comm, case)
    times, wrong = time_calls(comm, ready, plan.iterations, plan.warmup, plan.graphs, bool(plan.check))
    said = comm.agreement.gather({"times": [round(t, 3) for t in times], "wrong": wrong}, label="bench:times")
    if comm.ranks.rank != 0:
        return None
    summary = summarise([entry["times"] for entry in said])
    nbytes = operation.size(case)
    algbw = nbytes / summary["time_us"] / 1e3 if summary["time_us"] else 0.0
    carrier = "control" if case.op == "agree" else plan.transport
    return {
        "op": case.op,
        "bytes": nbytes,
        "count": nbytes // case.item if case.op != "agree" else 1,
        "dtype": dtype_name(case.torch_dtype) if case.op != "agree" else "int64",
        "redop": case.redop,
        "transport": carrier,
        "graph": plan.graphs,
        "rows": case.rows,
        "columns": case.columns,
        **summary,
        "algbw_gbps": round(algbw, 4),
        "busbw_gbps": round(algbw * operation.factor(case.world), 4),
        "wrong": sum(entry["wrong"] for entry in said) if plan.check else None,
    }


class Printer:
    """What rank 0 shows: nccl-tests' columns, plain when not a terminal, with progress on one."""

    def __init__(self, plan: BenchPlan, world: int) -> None:
        self._plan = plan
        self._quiet = plan.json_file == "-"
        self._tty = sys.stdout.isatty() and not self._quiet
        if not self._quiet:
            print(
                f"# dsv41_dist bench: {world} ranks, {plan.device}, {plan.transport}, {plan.iterations} iterations, "
                f"{plan.warmup} warm-up, check {'on' if plan.check else 'OFF'}"
                + (f", {plan.graphs} replays of a CUDA graph" if plan.graphs else "")
            )
            print(_HEADER)
            print(_UNITS, flush=True)

    def begin(self, index: int, case: Case) -> None:
        if self._tty:
            print(f"\r{index + 1}/{len(self._plan.cases)} {case.op} ...\033[K", end="", flush=True)

    def row(self, row: dict[str, Any]) -> None:
        if self._quiet:
            return
        wrong = "N/A" if row["wrong"] is None else str(row["wrong"])
        text = (
            f"{row['op']:<19}{row['bytes']:>12}{row['count']:>12}{row['dtype']:>10}{row['redop']:>7}"
            f"{row['time_us']:>11.2f}{row['algbw_gbps']:>8.3f}{row['busbw_gbps']:>8.3f}{wrong:>8}"
            f"{row['p50_us']:>11.2f}{row['p99_us']:>11.2f}{row['cv'] * 100:>7.1f}{row['slowest_rank']:>9}"
        )
        if self._tty:
            text = f"\r\033[K\033[31m{text}\033[0m" if row["wrong"] else f"\r\033[K{text}"
        print(text, flush=True)

    def finish(self, rows: list[dict[str, Any]], env: dict[str, Any]) -> int:
        """Write what was asked for; 1 for any wrong element, or for a line below the baseline."""
        plan = self._plan
        results = {"env": env, "rows": rows}
        wrong = sum(row["wrong"] or 0 for row in rows)
        slow: list[str] = []
        if plan.baseline:
            slow = compare_with_baseline(rows, read_baseline(plan.baseline, env["world_size"], env["device"]))
        if plan.json_file == "-":
            print(json.dumps(results, indent=1))
        elif plan.json_file:
            Path(plan.json_file).write_text(json.dumps(results, indent=1) + "\n")
        if plan.plot_file:
            draw(results, plan.plot_file)
        if not self._quiet:
            state = "not checked" if not plan.check else f"{wrong} {'OK' if not wrong else 'FAILED'}"
            print(f"# wrong elements: {state}")
            print(f"# average bus bandwidth: {sum(r['busbw_gbps'] for r in rows) / len(rows):.4f} GB/s")
            for row in rows:
                _compare_seqpar(row, rows)
            if plan.baseline:
                print(f"# baseline {plan.baseline}: {'OK' if not slow else 'FAILED'}")
        for line in slow:
            print(f"baseline: {line}", file=sys.stderr)
        return 1 if wrong or slow else 0


def _compare_seqpar(row: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    if row["op"] != "seqpar":
        return
    for other in rows:
        if other["op"] == "seqpar_reference" and (other["bytes"], other["dtype"]) == (row["bytes"], row["dtype"]):
            ratio = other["p50_us"] / row["p50_us"]
            print(f"# seqpar {row['rows']}x{row['columns']} {row['dtype']}: {ratio:.2f}x the all-reduce form (p50)")


def draw(results: dict[str, Any], file: str) -> None:
    """Latency (p50) and bus bandwidth over size, log-log, one line per op, dtype and transport."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    series: dict[str, list[dict[str, Any]]] = {}
    for row in results["rows"]:
        graph = " graph" if row["graph"] else ""
        series.setdefault(f"{row['op']} {row['dtype']} {row['transport']}{graph}", []).append(row)
    figure, axes = plt.subplots(1, 2, figsize=(12, 5), layout="constrained")
    for name, rows in series.items():
        ordered = sorted(rows, key=lambda r: r["bytes"])
        sizes = [row["bytes"] for row in ordered]
        axes[0].plot(sizes, [row["p50_us"] for row in ordered], marker="o", label=name)
        axes[1].plot(sizes, [max(row["busbw_gbps"], 1e-6) for row in ordered], marker="o", label=name)
    for axis, title in zip(axes, ("latency, p50 (us)", "bus bandwidth (GB/s)"), strict=True):
        axis.set(xscale="log", yscale="log", xlabel="size (bytes)", ylabel=title)
        axis.set_xscale("log", base=2)
        axis.grid(True, which="both", alpha=0.3)
    axes[0].legend(fontsize="small")
    env = results["env"]
    where = (
        f"{env['gpus'][0]} x{env['world_size']}" if env.get("gpus") else f"{env['world_size']} ranks on {env['cpu']}"
    )
    figure.suptitle(f"dsv41_dist bench: {where}, torch {env['versions']['torch']}", fontsize="medium")
    figure.savefig(file, dpi=130)
    plt.close(figure)
