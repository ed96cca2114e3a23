"""Facts about the engine on this rank, for `preflight` to compare over ranks. Reads files, imports no engine."""

from __future__ import annotations

from typing import Any

from .. import __version__
from ..adapters import REGISTRY
from ..engine import drift
from ..engine.agreement import differences
from ..engine.gates import GateError, Gates
from ..engine.survey import all_targets, published, survey
from ..engine.tree import EngineNotFound, EngineTree
from .checks import Context, Result, check

__all__ = ["engine_check", "engine_facts"]


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
    problems.extend(f"{row.name}: {row.status}: {row.detail}" for row in survey(tree, REGISTRY, gates) if row.refused)
    return {"same": same, "problems": problems, "local": local}


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
