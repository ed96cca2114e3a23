"""The import hook: patch an engine module right after it executed, or refuse. Torch-free.

One finder serves the modules named by the enabled adapters' targets, so none can be forgotten. For each module, in
registry order: compare its source with the recorded release, install, then rebind stale copies. Whatever goes wrong
is a refusal (refusal.py): a half-patched engine must not serve.
"""

from __future__ import annotations

import functools
import importlib
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from . import drift
from .rebind import rebind
from .refusal import refuse, refuse_again
from .state import AdapterState
from .symbols import Target
from .tree import EngineTree

__all__ = ["Hook", "Patch", "Patcher", "tree_of"]

_DRIFT_ADVICE = (
    "Run `python -m dsv41_dist doctor` to see what changed; then install a release it lists as `applies`, or unset "
    "the adapter's gate on every rank."
)


class Patcher(Protocol):
    """What the hook needs of an adapter."""

    @property
    def name(self) -> str: ...

    @property
    def targets(self) -> Sequence[Target]: ...

    def install(self, patch: Patch) -> None:
        """Called once for each module that has patched targets (again after a reload), after the drift check."""
        ...


class Patch:
    """One adapter's access to one freshly executed engine module."""

    def __init__(self, module: types.ModuleType, patcher: Patcher, state: AdapterState, release: str) -> None:
        self.module = module
        self.release = release
        self.state = state
        self._targets = {
            target.qualname: target
            for target in patcher.targets
            if target.patched and target.module == module.__name__ and target.is_for(release)
        }
        self.done: dict[str, tuple[Any, Any]] = {}

    @property
    def qualnames(self) -> list[str]:
        """The declared targets that this module must have patched."""
        return list(self._targets)

    def wrap(self, qualname: str, make: Callable[[Any], Any]) -> None:
        """Replace a declared target by `make(original)`.

        Static and class methods stay what they are; `make` sees the plain function. Raises KeyError for a target
        that is not declared, AttributeError when it is not there.
        """
        if qualname not in self._targets:
            raise KeyError(f"{self.module.__name__}:{qualname} is not a declared target of this adapter")
        owner, raw = resolve(self.module, qualname)
        kind = type(raw) if isinstance(raw, (staticmethod, classmethod)) else None
        original = raw.__func__ if kind else raw
        new = make(original)
        if isinstance(original, types.FunctionType):
            functools.update_wrapper(new, original)
        setattr(owner, qualname.rpartition(".")[2], kind(new) if kind else new)
        self.done[qualname] = (original, new)


class Hook:
    """A meta-path finder. `arm` puts it first and patches what is already imported."""

    def __init__(self, patchers: Sequence[tuple[Patcher, AdapterState]]) -> None:
        self._patchers = list(patchers)
        self.modules = {target.module for patcher, _ in self._patchers for target in patcher.targets if target.patched}
        self._installed: dict[str, types.ModuleType] = {}
        # By module, each written in one step, so that imports in several threads need no lock of ours (a lock held
        # while an adapter imports would deadlock with the import system's own).
        self._expected: dict[str, list[tuple[Target, Any]]] = {}  # target, what we put there

    def arm(self) -> None:
        sys.meta_path.insert(0, self)
        for name in sorted(self.modules):
            if name in sys.modules:
                # Waits for a thread that is importing it; returns at once when it is complete.
                module = importlib.import_module(name)
                if self._installed.get(name) is not module:
                    self._install(module)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        """The spec the other finders give, with a loader that installs after execution."""
        if fullname not in self.modules:
            return None
        refuse_again()
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            if finder is self or find is None:
                continue
            spec = find(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    loader: Any = _Loader(spec.loader, self._install)
                    spec.loader = loader
                return spec
        return None

    def problems(self, root: Path) -> list[str]:
        """Static: every target of every enabled adapter in the engine at `root`, imported or not."""
        out: list[str] = []
        for patcher, _ in self._patchers:
            for finding in drift.check(EngineTree.at(root), patcher.targets):
                if finding.status != "same":
                    out.append(f"{patcher.name}: {finding.status}: {finding.detail}")
        return out

    def verify(self) -> list[str]:
        """What is no longer as installed: a watched module that came in by another way, a patch that was replaced."""
        out: list[str] = []
        for name in sorted(self.modules):
            module = sys.modules.get(name)
            if module is not None and self._installed.get(name) is not module:
                out.append(f"{name} was imported past the hook")
        for target, ours in [entry for entries in list(self._expected.values()) for entry in entries]:
            module = sys.modules.get(target.module)
            if module is None:
                continue  # the next import meets the finder
            try:  # as a caller finds it: the class that was patched may not be there any more
                found = functools.reduce(getattr, target.qualname.split("."), module)
            except AttributeError:
                found = None
            if not any(layer is ours for layer in _layers(getattr(found, "__func__", found))):
                out.append(f"{target.key} was replaced after it was patched")
        return out

    def _install(self, module: types.ModuleType) -> None:
        refuse_again()
        name = module.__name__
        try:
            changed = self._install_all(module)
            result = rebind((original, new) for original, new, _ in changed)
        except Exception as error:
            _forget(name)
            refuse(f"installing into {name} failed: {type(error).__name__}: {error}", _DRIFT_ADVICE)
        except SystemExit:
            _forget(name)
            raise
        if result.stuck:
            _forget(name)
            todo = "Arm earlier (PYTHONPATH door), or unset the adapter's gate on every rank."
            refuse(f"copies of patched functions of {name} cannot be replaced: {', '.join(result.stuck)}", todo)
        for (_, _, states), copies in zip(changed, result.replaced, strict=True):
            for state in states:
                state.rebound += copies
        self._installed[name] = module

    def _install_all(self, module: types.ModuleType) -> list[tuple[Any, Any, list[AdapterState]]]:
        """What was patched: the original, the outermost wrapper, and whose wrappers they are."""
        tree = tree_of(module)
        first: dict[str, Any] = {}
        last: dict[str, Any] = {}
        whose: dict[str, list[AdapterState]] = {}
        expected: list[tuple[Target, Any]] = []
        for patcher, state in self._patchers:
            here = [t for t in patcher.targets if t.module == module.__name__]
            for finding in drift.check(tree, here):
                if finding.status != "same":
                    diff = "\n".join(["", *finding.diff, ""]) if finding.diff else ""
                    refuse(f"{patcher.name} cannot be installed: {finding.detail}{diff}", _DRIFT_ADVICE)
            patch = Patch(module, patcher, state, tree.release)
            if not patch.qualnames:
                continue
            for qualname in patch.qualnames:
                if qualname not in first:
                    _check_live(module, qualname, tree)
            patcher.install(patch)
            missing = [name for name in patch.qualnames if name not in patch.done]
            if missing:
                raise RuntimeError(f"{patcher.name} left {', '.join(missing)} unpatched")
            for qualname, (original, new) in patch.done.items():
                first.setdefault(qualname, original)
                last[qualname] = new
                whose.setdefault(qualname, []).append(state)
                target = next(t for t in here if t.qualname == qualname)
                state.patched[target.key] = state.patched.get(target.key, 0) + 1
                expected.append((target, new))
        self._expected[module.__name__] = expected
        return [(first[qualname], last[qualname], whose[qualname]) for qualname in first]


class _Loader:
    """Delegates to the real loader, then installs. Steps aside before execution, so the module never sees it."""

    def __init__(self, loader: Any, install: Callable[[types.ModuleType], None]) -> None:
        self._loader = loader
        self._install = install

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        # A module may replace itself in sys.modules; what importers get is what must be patched.
        self._install(sys.modules.get(module.__name__, module))


def _forget(name: str) -> None:
    """A later import must meet the finder again, not find the unpatched module in sys.modules or in its parent."""
    sys.modules.pop(name, None)
    parent, _, leaf = name.rpartition(".")
    if parent in sys.modules:
        vars(sys.modules[parent]).pop(leaf, None)


def resolve(module: types.ModuleType, qualname: str) -> tuple[Any, Any]:
    """(owner, raw attribute) of a qualified name; the raw attribute keeps staticmethod and classmethod objects."""
    owner: Any = module
    *path, name = qualname.split(".")
    for part in path:
        owner = vars(owner)[part]
    if name not in vars(owner):
        raise AttributeError(f"{module.__name__} has no {qualname}")
    return owner, vars(owner)[name]


def tree_of(module: types.ModuleType) -> EngineTree:
    """The engine a module was loaded from, by its file."""
    origin = getattr(module.__spec__, "origin", None)
    if not origin or not origin.endswith(".py"):
        raise RuntimeError(f"{module.__name__} was not loaded from a source file ({origin})")
    up = module.__name__.count(".") + (1 if origin.endswith("__init__.py") else 0)
    return EngineTree.at(Path(origin).parents[up])


def _check_live(module: types.ModuleType, qualname: str, tree: EngineTree) -> None:
    """The object in memory must be the function of the file that was compared, or a wrapper that says so."""
    raw = resolve(module, qualname)[1]
    inner = _layers(raw)[-1]
    code = getattr(inner, "__code__", None)
    origin = module.__spec__.origin if module.__spec__ else None
    if code is not None and origin is not None and Path(code.co_filename) != Path(origin):
        raise RuntimeError(f"{qualname} is not the function of {origin}: it was replaced by one of {code.co_filename}")


def _layers(raw: Any) -> list[Any]:
    """A function and what it says it wraps, outermost first."""
    out: list[Any] = [raw.__func__ if isinstance(raw, (staticmethod, classmethod)) else raw]
    while hasattr(out[-1], "__wrapped__") and len(out) < 100:
        out.append(out[-1].__wrapped__)
    return out
