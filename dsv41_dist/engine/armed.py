"""An armed process: its gates, its adapters' states, the two agreements and the report. See boot.py. Torch-free until
the engine has imported torch itself."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
import types
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from .. import __version__
from . import agreement
from .gates import GateError, Gates
from .hook import Hook, Patch, Patcher, tree_of
from .names import PREFIXES
from .refusal import latched, refuse, refuse_again, say
from .report import text_table, write_json
from .state import AdapterState
from .symbols import Target
from .tree import EngineTree

__all__ = ["NO_TARGETS", "AdapterSpec", "Armed", "enabled"]

PARALLEL_STATE = "sglang.srt.distributed.parallel_state"
SCHEDULER = "sglang.srt.managers.scheduler"
NO_TARGETS = "this release has none of its targets"
_REFRESH_S = 1.0


class AdapterSpec(Patcher, Protocol):
    """What boot needs of an adapter (adapters/base.py is the class)."""

    @property
    def guarantee(self) -> str: ...

    @property
    def native(self) -> Mapping[str, str]: ...

    def by_default(self, gates: Mapping[str, Any]) -> bool: ...


def enabled(gates: Gates, registry: Sequence[AdapterSpec]) -> set[str]:
    """Names of the adapters that these gates turn on, on this machine."""
    # No adapter is on by default where nothing of ours is set: boot does not even look there.
    by_default = (adapter.name for adapter in registry if gates.texts and adapter.by_default(gates))
    return {*gates.owners_on(), *by_default}


class Armed:
    """One per process, made by boot.arm."""

    # Boot's own targets: checked for drift like any adapter's.
    name = "boot"
    targets = (
        Target(PARALLEL_STATE, "initialize_model_parallel"),
        Target(PARALLEL_STATE, "get_tp_group", patched=False),
        Target(SCHEDULER, "Scheduler.get_init_info"),
    )

    def __init__(self, gates: Gates, adapters: Sequence[AdapterSpec]) -> None:
        self.gates = gates
        self.adapters = list(adapters)
        self.states = {adapter.name: AdapterState(adapter.name, adapter.guarantee) for adapter in adapters}
        own = AdapterState(self.name, "")
        # Boot comes last, so that its wrappers are outermost.
        self.hook = Hook([*((adapter, self.states[adapter.name]) for adapter in adapters), (self, own)])
        self.group: agreement.Group | None = None
        self.release: str | None = None
        self.ready = False
        self.ended = False
        self._writing = threading.Lock()

    @classmethod
    def from_env(cls, registry: Sequence[AdapterSpec]) -> Armed:
        try:
            gates = Gates.from_env()
        except GateError as error:
            refuse(str(error), "Set it to an allowed value or unset it, on every rank; docs/gates.md lists all.")
        known = {adapter.name: adapter for adapter in registry}
        missing = [name for name in gates.owners_on() if name not in known]
        if missing:
            refuse(
                f"a gate turns on {', '.join(missing)}, which dsv41_dist {__version__} does not have",
                "Unset the gate on every rank; `python -m dsv41_dist adapters` lists what there is.",
            )
        on = enabled(gates, registry)
        return cls(gates, [adapter for adapter in registry if adapter.name in on])

    def start(self) -> None:
        """Put the hook in place; nothing to do when no adapter is enabled."""
        if self.adapters:
            self.hook.arm()

    def check_unchanged(self) -> None:
        """The second door of a process: the same gates, or a refusal."""
        now = {name: text.strip() for name, text in os.environ.items() if name.startswith(PREFIXES) and text.strip()}
        if now != self.gates.texts:
            changed = sorted(set(now.items()) ^ set(self.gates.texts.items()))
            refuse(
                f"gates changed after they were read: {', '.join(dict.fromkeys(name for name, _ in changed))}",
                "Set them before Python starts.",
            )

    def install(self, patch: Patch) -> None:
        """Boot's own wrappers (this object is the last of the hook's patchers)."""
        module = patch.module
        if module.__name__ == PARALLEL_STATE:

            def after_groups(original: Any) -> Any:
                def initialize_model_parallel(*args: Any, **kwargs: Any) -> Any:
                    result = original(*args, **kwargs)
                    self._group_formed(module)
                    return result

                return initialize_model_parallel

            patch.wrap("initialize_model_parallel", after_groups)
        else:

            def before_ready(original: Any) -> Any:
                def get_init_info(*args: Any, **kwargs: Any) -> Any:
                    self.serving()
                    return original(*args, **kwargs)

                return get_init_info

            patch.wrap("Scheduler.get_init_info", before_ready)

    def _group_formed(self, parallel_state: types.ModuleType) -> None:
        if self.group is not None:
            return
        refuse_again()
        tree = tree_of(parallel_state)
        self.release = tree.release
        for adapter in self.adapters:
            self.states[adapter.name].native = adapter.native.get(tree.release)
        self.group = agreement.form(parallel_state.get_tp_group(), self.gates["DSV41_BOOT_TIMEOUT_S"])
        self.group.same(
            {
                "engine release": tree.version,
                "dsv41_dist": __version__,
                "gates": self.gates.shared(),
                "gates digest": self.gates.digest(),
                "adapters": list(self.states),
                "drift": self.problems(tree),
            },
            label="boot:group",
        )

    def problems(self, tree: EngineTree) -> list[str]:
        """What makes this engine one to refuse: drift, and an enabled adapter that would do nothing in this release."""
        out = self.hook.problems(tree.root)
        for adapter in self.adapters:
            if tree.release not in adapter.native and not any(t.is_for(tree.release) for t in adapter.targets):
                out.append(f"{adapter.name}: absent: {NO_TARGETS}")
        return out

    def serving(self) -> None:
        """Before the engine says that it is ready: agree on what was installed, then report. Once per process."""
        if self.ready:
            return
        if self.group is None:
            refuse_again()
            refuse("the engine is about to serve, but its TP group was never seen", "Arm before the engine starts.")
        self.group.same(
            {
                "installed": {name: sorted(state.patched) for name, state in self.states.items()},
                "refused": latched() or "",
                "drift": self.hook.verify(),
            },
            label="boot:serving",
        )
        self.group.close()
        self.ready = True
        if self.group.rank == 0:
            say(text_table(self.as_json()))
            if self.gates["DSV41_BOOT_REPORT"]:
                self._write()
                for state in self.states.values():
                    state.on_first_fire = self._write
                threading.Thread(target=self._keep_written, name="dsv41-boot-report", daemon=True).start()
                atexit.register(self._end)

    def as_json(self) -> dict[str, Any]:
        """The boot report: environment of the group, and one entry per enabled adapter."""
        return {
            "engine_release": self.release,
            "dsv41_dist": __version__,
            "gates": dict(self.gates.texts),
            "gates_digest": self.gates.digest(),
            "ranks": self.group.size if self.group is not None else None,
            "adapters": [state.as_json(self.ended) for state in self.states.values()],
        }

    def _write(self) -> None:
        with self._writing:
            write_json(self.gates["DSV41_BOOT_REPORT"], self.as_json())

    def _keep_written(self) -> None:
        """The engine kills its ranks, and nothing runs at their exit: so the file is never older than a moment."""
        written: dict[str, Any] = {}
        while not self.ended:
            time.sleep(_REFRESH_S)
            with contextlib.suppress(RuntimeError):  # an adapter was adding an entry to its state
                now = self.as_json()
                if now != written:
                    self._write()
                    written = now

    def _end(self) -> None:
        self.ended = True
        self._write()
