"""Facts about the engine on this rank, for `preflight` to compare over ranks. Reads files, imports no engine."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, cast

from .. import __version__
from ..adapters import REGISTRY
from ..adapters._speculative_modes import RULES, Facts
from ..engine import drift
from ..engine.agreement import differences
from ..engine.gates import GateError, Gates
from ..engine.survey import all_targets, published, survey
from ..engine.tree import EngineNotFound, EngineTree
from .checks import Context, Result, check

__all__ = ["engine_check", "engine_facts", "refused_pairs"]


def engine_facts() -> dict[str, Any]:
    """JSON-able facts of this process's environment.

    `same` must be equal on every rank: engine release, fingerprints digest, gates digest, the gates that are set,
    package version. `problems` must be empty on every rank. `local` is for the reader (path of the engine). Where no
    engine is installed, release and fingerprints are None, which is a problem only if an adapter's gate is on.
    """
    problems: list[str] = []
    try:
        gates = Gates.from_env()
    except GateError as error:
        problems.extend(str(error).splitlines())
        gates = Gates.from_env({})
    same: dict[str, Any] = {
        "engine release": None,
        "fingerprints": None,
        "gates digest": gates.digest(),
        "gates": gates.shared(),
        "dsv41_dist": __version__,
    }
    local: dict[str, Any] = {"engine_path": None}
    try:
        tree = EngineTree.installed()
    except EngineNotFound as error:
        if gates.owners_on():
            problems.append(str(error))
        return {"same": same, "problems": problems, "local": local}
    same["engine release"] = tree.version
    same["fingerprints"] = drift.digest(drift.check(tree, all_targets(REGISTRY), published))
    local["engine_path"] = str(tree.root)
    rows = survey(tree, REGISTRY, gates)
    problems.extend(f"{row.name}: {row.status}: {row.detail}" for row in rows if row.refused)
    problems.extend(refused_pairs((row.name for row in rows if row.is_set), gates, tree.release))
    return {"same": same, "problems": problems, "local": local}


def refused_pairs(names: Iterable[str], gates: Gates, release: str) -> list[str]:
    """What boot would refuse of the adapters `names`, which are on, by gates and release alone. The rules that ask for
    the engine's settings too are left to boot."""
    known, on = cast(Facts, SimpleNamespace(gates=gates, release=release)), set(names)
    found: list[str] = []
    for rule in RULES:
        try:
            if rule.adapter in on and rule.verdict == "refused" and rule.holds(known):
                found.append(f"{rule.adapter} does not go with {rule.other}: {rule.why}")
        except AttributeError:  # it asked for a setting of the engine
            continue
    return found


@check("engine", "Engine and gates")
def engine_check(context: Context) -> Result:
    """The same engine release, fingerprints, gates and package on every rank, and no gate that would be refused."""
    everyone = context.comm.agreement.gather(engine_facts(), label="preflight:engine")
    columns = ["engine release", "fingerprints", "gates digest", "dsv41_dist"]
    result = Result(columns=["rank", *columns, "engine_path"], data={"engine": everyone})
    for rank, facts in enumerate(everyone):
        cells = [facts["same"][column] for column in columns] + [facts["local"]["engine_path"]]
        result.rows.append([str(rank), *("none" if cell is None else str(cell) for cell in cells)])
    said = [{**facts["same"], "problem": facts["problems"]} for facts in everyone]
    result.reasons = [line.strip() for line in differences(said)]
    return result
