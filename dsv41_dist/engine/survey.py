"""What an engine means for each adapter: the rows of `doctor`. Reads files only. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from . import drift
from .armed import NO_TARGETS, AdapterSpec, Armed, enabled
from .drift import Finding
from .gate_table import GATES
from .gates import Gates
from .tree import EngineNotFound, EngineTree

__all__ = ["Row", "all_targets", "cache_folder", "published", "survey"]


class Row(NamedTuple):
    """One adapter against one engine.

    `status` is applies, native, drifted, absent, or planned (this version has the gate but not the adapter).
    `is_set`: its gate is on in the given environment. `refused`: it is on and would end the process at boot.
    """

    name: str
    status: str
    detail: str
    is_set: bool
    findings: tuple[Finding, ...] = ()

    @property
    def refused(self) -> bool:
        return self.is_set and self.status not in ("applies", "native")

    def as_json(self) -> dict[str, Any]:
        return {
            "adapter": self.name,
            "status": self.status,
            "detail": self.detail,
            "gate_set": self.is_set,
            "refused": self.refused,
            "targets": [
                {"target": f.target.key, "status": f.status, "detail": f.detail, "diff": list(f.diff)}
                for f in self.findings
            ],
        }


def survey(tree: EngineTree, registry: Sequence[AdapterSpec], gates: Gates) -> list[Row]:
    """One row for boot's own targets, one per adapter of the registry, one per adapter that only has gates yet."""
    on = enabled(gates, registry)
    boot = drift.check(tree, Armed.targets, published)
    rows = [Row("boot", *_status(boot), bool(on), tuple(boot))]
    for adapter in registry:
        is_set = adapter.name in on
        findings = drift.check(tree, adapter.targets, published)
        flag = adapter.native.get(tree.release)
        # What a native adapter still patches or relies on is checked at boot like any other's.
        if flag is not None and all(finding.status == "same" for finding in findings):
            said = ("native", f"use the engine's own: {flag}")
        else:
            said = _status(findings)
        rows.append(Row(adapter.name, *said, is_set, tuple(findings)))
    here = {adapter.name for adapter in registry}
    later = dict.fromkeys(gate.owner for gate in GATES if gate.switch and gate.owner not in here)
    rows.extend(Row(name, "planned", "not in this version: setting its gate is refused", name in on) for name in later)
    return rows


def _status(findings: Sequence[Finding]) -> tuple[str, str]:
    wrong = [finding for finding in findings if finding.status != "same"]
    if not findings:
        return "absent", NO_TARGETS
    if not wrong:
        return "applies", f"{len(findings)} targets as published"
    statuses = {finding.status for finding in wrong}
    status = "absent" if statuses == {"absent"} else "drifted"
    if "unknown release" in statuses:
        return status, wrong[0].detail
    return status, f"{len(wrong)} of {len(findings)} targets: {', '.join(f.target.qualname for f in wrong)}"


def all_targets(registry: Sequence[AdapterSpec]) -> list[Any]:
    """Every engine symbol that anything here names."""
    return [*Armed.targets, *(target for adapter in registry for target in adapter.targets)]


def cache_folder() -> Path:
    """Where launch/engine_env.sh keeps published wheels (`wheels/`) and unpacked ones (`engines/<release>/`)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dsv41_dist"


def published(release: str) -> EngineTree | None:
    """The unpacked wheel of a release, where the cache has it: it gives diffs their removed lines."""
    try:
        return EngineTree.at(cache_folder() / "engines" / release)
    except EngineNotFound:
        return None
