"""Packages with compiled code that the engine imports on CUDA and a machine may lack: importable, and empty.

A function of theirs that is called says that it is not there, unless `FUNCTIONS` has one for it. For the rehearsal on
GPUs and the GPU tests: sgl_kernel and deep_gemm are built for the torch that a release pins, and no other.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Iterable
from types import FunctionType, ModuleType
from typing import Any

__all__ = ["FUNCTIONS", "become", "install", "lacking"]

PACKAGES = ("sgl_kernel", "deep_gemm", "vllm", "flashinfer", "tilelang")
FUNCTIONS: dict[str, Callable[..., Any]] = {}  # "package.function" -> what is called instead


class _Absent(ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []
        self.__version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        whole = f"{self.__name__}.{name}"
        value = FUNCTIONS.get(whole) or (type(name, (), {}) if name[0].isupper() else _Absent(whole))
        setattr(self, name, value)
        return value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and isinstance(args[0], FunctionType | type):  # used as a decorator
            return args[0]
        given = [f"{tuple(a.shape)}:{a.dtype}" if hasattr(a, "dtype") else repr(a)[:40] for a in args]
        raise NotImplementedError(
            f"{self.__name__}({', '.join(given)}): not on this machine, and nothing stands in for it"
        )

    def __bool__(self) -> bool:
        return False


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(names)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname.partition(".")[0] in self.names:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> ModuleType:
        return _Absent(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def lacking(packages: Iterable[str]) -> list[str]:
    """Those of `packages` that are not here, or do not load with this torch."""
    out: list[str] = []
    for name in packages:
        try:
            if importlib.util.find_spec(name) is None:
                out.append(name)
            else:
                importlib.import_module(name)
        except (ImportError, OSError, RuntimeError, ValueError):
            out.append(name)
    return out


def install(packages: Iterable[str] = PACKAGES) -> list[str]:
    """Stand in for those of `packages` that cannot be found; returns them."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    sys.meta_path.append(_Finder(missing))
    return missing


def become(name: str) -> None:
    """Called by the one line of a package `name` on the path: from here on that package is an absent one."""
    sys.meta_path.insert(0, _Finder((name,)))
    module = _Absent(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    sys.modules[name] = module
