"""`python -m dsv41_dist doctor`: what the installed engine release has drifted from, without importing it."""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from ..adapters import REGISTRY
from ..engine import drift
from ..engine.gates import GateError, Gates
from ..engine.survey import Row, all_targets, survey
from ..engine.tree import EngineNotFound, EngineTree
from .engine_checks import refused_pairs

__all__ = ["doctor"]


def doctor(
    engine: Annotated[Path | None, typer.Option(help="Folder of an unpacked sglang wheel, or a wheel.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
    record: Annotated[Path | None, typer.Option(help="Record the sglang-*.whl files of this folder, and exit.")] = None,
) -> None:
    """Say for each adapter whether it applies to an engine. Exit 1 when a gate that is set would be refused, as far as
    gates and release tell (not the engine's settings); 2 when there is no engine to look at."""
    try:
        if record is not None:
            for file in drift.write(record, all_targets(REGISTRY)):
                typer.echo(f"recorded {file}")
            return
        tree = EngineTree.at(engine) if engine is not None else EngineTree.installed()
    except (EngineNotFound, ValueError) as error:
        _fail(str(error), json)
    wrong: list[str] = []
    try:
        gates = Gates.from_env()
    except GateError as error:
        wrong, gates = str(error).splitlines(), Gates.from_env({})
    rows = survey(tree, REGISTRY, gates)
    wrong += refused_pairs((row.name for row in rows if row.is_set), gates, tree.release)
    refused = bool(wrong) or any(row.refused for row in rows)
    if json:
        typer.echo(jsonlib.dumps(_as_json(tree, rows, wrong, refused), indent=1))
    else:
        _print(tree, rows, wrong)
    raise typer.Exit(1 if refused else 0)


def _fail(text: str, json: bool) -> NoReturn:
    typer.echo(jsonlib.dumps({"error": text}) if json else text, err=not json)
    raise typer.Exit(2)


def _as_json(tree: EngineTree, rows: list[Row], wrong: list[str], refused: bool) -> dict[str, Any]:
    return {
        "engine": {"version": tree.version, "release": tree.release, "path": str(tree.root)},
        "known_releases": drift.known_releases(),
        "bad_gates": wrong,
        "refused": refused,
        "adapters": [row.as_json() for row in rows],
    }


def _print(tree: EngineTree, rows: list[Row], wrong: list[str]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"SGLang {tree.version} at {tree.root} (read, not imported)", markup=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("adapter", "status", "gate", "detail"):
        table.add_column(column, no_wrap=column != "detail")
    colours = {"applies": "green", "native": "cyan", "drifted": "red", "absent": "red", "planned": "dim"}
    shown = [row for row in rows if row.status != "planned" or row.refused]
    for row in shown:
        gate = ("REFUSED" if row.refused else "on") if row.is_set else ""
        table.add_row(row.name, f"[{colours[row.status]}]{row.status}[/]", gate, row.detail.replace("[", "\\["))
    console.print(table)
    planned = [row.name for row in rows if row not in shown]
    if planned:
        console.print(f"planned, not in this version (their gates are refused): {', '.join(planned)}", markup=False)
    for row in rows:
        for finding in row.findings:
            if finding.status != "same":
                console.print(f"\n{row.name}: {finding.status}: {finding.detail}", markup=False)
                console.print("\n".join(finding.diff), markup=False)
    for line in wrong:
        console.print(f"REFUSED {line}", markup=False)
