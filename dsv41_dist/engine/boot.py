"""Arm, agree, report: what both doors call. Imports neither torch nor sglang; nothing at all when no gate is set.

`arm` reads the gates and puts the import hook in place. When the engine has built its tensor-parallel group, the ranks
agree on release, gates, adapters, package version and drift; when it is about to say that it is ready, they agree on
what was installed, and rank 0 reports. A difference ends every rank with the same message.
"""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any

from .names import any_set

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .armed import AdapterSpec, Armed

__all__ = ["arm", "armed", "report"]

_lock = threading.RLock()  # arming imports, and what is imported may come to the other door
_armed: Armed | None = None


def arm(registry: Sequence[AdapterSpec]) -> bool:
    """Install what the environment asks for, once per process. Returns whether anything is armed.

    Raises SystemExit (refusal.py) for a bad gate, a gate without an adapter in `registry`, an interpreter that ignores
    PYTHON* variables, gates that changed since the first call, or an installation that fails.
    """
    global _armed
    if not any_set() and _armed is None:
        return False
    from .armed import Armed
    from .refusal import refuse, refuse_again

    refuse_again()
    if sys.flags.isolated or sys.flags.no_site or sys.flags.ignore_environment:
        refuse(
            "this interpreter runs with -I, -E or -S, which is not supported: ranks that it starts do not see "
            "PYTHONPATH or the installed plug-ins, and would serve unpatched",
            "Start Python without these options.",
        )
    with _lock:
        if _armed is None:
            _armed = Armed.from_env(registry)
            try:
                _armed.start()
            except Exception as error:
                # Kept as a refusal: the next door must not take what is half in place for armed.
                refuse(
                    f"arming failed: {type(error).__name__}: {error}",
                    "Repair what it names, or unset the gates on every rank.",
                )
        else:
            _armed.check_unchanged()
    return bool(_armed.states)


def armed() -> Armed | None:
    """What is armed in this process, or None."""
    return _armed


def report() -> dict[str, Any] | None:
    """The boot report so far as JSON-able data, or None when nothing is armed."""
    return _armed.as_json() if _armed is not None else None
