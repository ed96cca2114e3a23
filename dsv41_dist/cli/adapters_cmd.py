"""`python -m dsv41_dist adapters`: what there is, its gates, its guarantee and its page."""

from __future__ import annotations

import json as jsonlib
from typing import Annotated, Any

import typer

from ..adapters import REGISTRY
from ..engine.gate_table import GATES
from ..engine.gates import markdown

__all__ = ["adapters"]


def adapters(
    json: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
    gates_markdown: Annotated[bool, typer.Option("--gates-markdown", help="Print docs/gates.md, and exit.")] = False,
) -> None:
    """List the adapters of this version with their gates, guarantees and pages."""
    if gates_markdown:
        typer.echo(markdown(), nl=False)
        return
    entries = [_entry(adapter) for adapter in REGISTRY]
    if json:
        typer.echo(jsonlib.dumps({"adapters": entries}, indent=1))
        return
    for entry in entries:
        typer.echo(f"{entry['name']}: {entry['summary']}")
        typer.echo(f"  guarantee: {entry['guarantee']}")
        for gate in entry["gates"]:
            typer.echo(f"  {gate['name']}: {gate['doc']} Allowed: {gate['allowed']}.")
        for release, flag in entry["native"].items():
            typer.echo(f"  native in {release}: {flag}")
        typer.echo(f"  releases: {', '.join(entry['releases']) or 'all known'}; page: {entry['docs']}")


def _entry(adapter: Any) -> dict[str, Any]:
    gates = [
        {
            "name": gate.name,
            "allowed": gate.kind.allowed,
            "default": gate.default,
            "switch": gate.switch,
            "doc": gate.doc,
        }
        for gate in GATES
        if gate.owner == adapter.name
    ]
    always = any(not target.releases for target in adapter.targets)
    releases = [] if always else sorted({release for target in adapter.targets for release in target.releases})
    return {
        "name": adapter.name,
        "summary": adapter.summary,
        "guarantee": str(adapter.guarantee),
        "gates": gates,
        "native": dict(adapter.native),
        "releases": releases,
        "docs": adapter.docs,
    }
