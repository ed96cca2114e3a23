"""Packages with compiled code that the engine imports on CUDA and a GPU test machine lacks: sgl_kernel, deep_gemm.

`install` makes them importable; a function of theirs that is called says that it is not there: no test may need one."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from types import FunctionType, ModuleType
from typing import Any

__all__ = ["install"]

PACKAGES = ("sgl_kernel", "deep_gemm", "vllm", "flashinfer", "tilelang")


class _Absent(ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []
        self.__version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = type(name, (), {}) if name[0].isupper() else _Absent(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and isinstance(args[0], FunctionType | type):  # used as a decorator
            return args[0]
        raise NotImplementedError(f"{self.__name__} is not on this machine, and the test must not need it")

    def __bool__(self) -> bool:
        return False


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname.partition(".")[0] in self.names:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> ModuleType:
        return _Absent(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def install() -> list[str]:
    """Stand in for those of PACKAGES that cannot be found; returns them."""
    lacking = tuple(name for name in PACKAGES if importlib.util.find_spec(name) is None)
    sys.meta_path.append(_Finder(lacking))
    return list(lacking)
