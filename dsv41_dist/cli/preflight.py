"""`preflight`: is this group fit to serve? Every check on every rank, then READY or NOT READY with the reasons."""

from __future__ import annotations

import json
import shutil
import sys
import time
from dataclasses import dataclass
from typing import Any

from ..comm.errors import CommError
from ..comm.settings import CommSettings

__all__ = ["PreflightPlan", "run_preflight"]


@dataclass(frozen=True)
class PreflightPlan:
    launcher: str
    device: str
    transport: str
    drill: bool
    json_out: bool


def run_preflight(rank: int, size: int, plan: PreflightPlan) -> int:
    """Join, run the checks, report on rank 0. Returns 0 for READY, 1 for NOT READY, the same on every rank."""
    from ..comm import Communicator
    from . import engine_checks, preflight_checks, roce_checks  # noqa: F401  (they register their checks)
    from .checks import CHECKS, Context, Result
    from .environment import environment
    from .session import join

    settings = CommSettings.from_env()
    started = time.monotonic()
    ranks = join(plan.launcher, plan.device, plan.transport, settings)
    try:
        comm = Communicator.create(ranks, [plan.transport], settings=settings)
    except CommError as error:
        # Every rank raises this one; it names who said what.
        if rank == 0:
            _verdict([str(error)], plan, {}, size, time.monotonic() - started)
        return 1
    context = Context(ranks, comm, settings, plan.device, plan.transport, plan.launcher, {"drill": plan.drill})
    show = Show(plan.json_out) if rank == 0 else None
    if show:
        show.say(f"dsv41_dist preflight: {size} ranks, started by {plan.launcher}, {plan.device}, {plan.transport}")
    reasons: list[str] = []
    data: dict[str, Any] = {}
    for item in CHECKS:
        if not item.wanted(context):
            continue
        if show:
            show.begin(item.title)
        try:
            result = item.run(context)
        except CommError as error:
            result = Result([f"{type(error).__name__}: {error}"])
        data[item.name] = {"passed": not result.reasons, "reasons": result.reasons, **result.data}
        reasons += [f"{item.name}: {reason}" for reason in result.reasons]
        if show:
            show.table(item.title, result)
        if context.comm.closed:
            break
    if rank == 0:
        data["env"] = environment(size, plan.launcher, plan.device, settings)
        _verdict(reasons, plan, data, size, time.monotonic() - started)
    comm.close()
    return 1 if reasons else 0


def _verdict(reasons: list[str], plan: PreflightPlan, data: dict[str, Any], size: int, seconds: float) -> None:
    ready = not reasons
    if plan.json_out:
        print(json.dumps({"ready": ready, "reasons": reasons, "seconds": round(seconds, 1), **data}, indent=1))
        return
    for reason in reasons:
        print(f"- {reason}")
    text = f"{'READY' if ready else 'NOT READY'}: {size} ranks, {plan.transport}, {seconds:.1f} s"
    if sys.stdout.isatty():
        text = f"\033[1;{32 if ready else 31}m{text}\033[0m"
    print(text, flush=True)


class Show:
    """Tables: rich on a terminal, plain columns elsewhere, nothing when JSON is wanted."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._tty = sys.stdout.isatty() and not quiet
        self._clear = "\r\033[K" if self._tty else ""

    def begin(self, title: str) -> None:
        """On a terminal, what is being checked now."""
        if self._tty:
            print(f"\r\033[K{title} ...", end="", flush=True)

    def say(self, text: str) -> None:
        if not self._quiet:
            print(text, flush=True)

    def table(self, title: str, result: Any) -> None:
        if self._quiet:
            return
        state = "ok" if not result.reasons else "FAILED"
        rows = [result.columns, *result.rows]
        widths = [max(len(row[i]) for row in rows) for i in range(len(result.columns))]
        # A table squeezed into a narrow terminal cuts the names that matter: plain columns wrap, and lose nothing.
        if self._tty and sum(widths) + 3 * len(widths) + 1 <= shutil.get_terminal_size().columns:
            from rich.console import Console
            from rich.table import Table

            print("\r\033[K", end="", flush=True)
            table = Table(*result.columns, title=f"{title}: {state}", title_justify="left")
            for row in result.rows:
                table.add_row(*row)
            Console().print(table)
            return
        print(f"{self._clear}\n{title}: {state}")
        for row in rows:
            print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        sys.stdout.flush()
