"""The checks of `preflight`: a registry. A check is a function from Context to Result that all ranks call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

__all__ = ["CHECKS", "Check", "Context", "Result", "check"]


@dataclass
class Context:
    """What a check may use. `comm` is connected; `options` are the command's."""

    ranks: Any
    comm: Any
    settings: Any
    device: str
    transport: str
    launcher: str
    options: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass
class Result:
    """What a check found: `reasons` empty is a pass. `columns` and `rows` are its table, the same on every rank."""

    reasons: list[str] = field(default_factory=list[str])
    columns: list[str] = field(default_factory=list[str])
    rows: list[list[str]] = field(default_factory=list[list[str]])
    data: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class Check:
    name: str
    title: str
    run: Callable[[Context], Result]
    wanted: Callable[[Context], bool] = lambda context: True


#: In the order in which preflight runs them.
CHECKS: list[Check] = []


def check(
    name: str, title: str, wanted: Callable[[Context], bool] = lambda context: True
) -> Callable[[Callable[[Context], Result]], Callable[[Context], Result]]:
    """Register a check under a name. `wanted` says, equally on every rank, whether it runs."""

    def register(run: Callable[[Context], Result]) -> Callable[[Context], Result]:
        if any(known.name == name for known in CHECKS):
            raise ValueError(f"a check named {name!r} is registered already")
        CHECKS.append(Check(name, title, run, wanted))
        return run

    return register
