"""Facts about the engine on this rank, for `preflight` to compare over ranks. Reads files, imports no engine."""

from __future__ import annotations

from typing import Any

from .. import __version__
from ..adapters import REGISTRY
from ..engine import drift
from ..engine.gates import GateError, Gates
from ..engine.survey import all_targets, published, survey
from ..engine.tree import EngineNotFound, EngineTree

__all__ = ["engine_facts"]


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
        "engine_release": None,
        "fingerprints": None,
        "gates_digest": gates.digest(),
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
    same["engine_release"] = tree.version
    same["fingerprints"] = drift.digest(drift.check(tree, all_targets(REGISTRY), published))
    local["engine_path"] = str(tree.root)
    problems.extend(f"{row.name}: {row.status}: {row.detail}" for row in survey(tree, REGISTRY, gates) if row.refused)
    return {"same": same, "problems": problems, "local": local}
