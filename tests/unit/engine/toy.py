"""A toy engine: a package named sglang with a recorded release, and a way to run code against it in a fresh Python."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import textwrap
import zipfile
from collections.abc import Mapping
from pathlib import Path

from dsv41_dist.engine import drift
from dsv41_dist.engine.symbols import Target

ROOT = Path(__file__).parents[3]
DOOR = ROOT / "dsv41_dist" / "sitecustomize"

FILES = {
    "sglang/__init__.py": "",
    "sglang/_version.py": "__version__ = version = '9.9.1'\n",
    "sglang/ops.py": '''
        """Functions of many kinds."""


        def scale(x, *, by=2):
            """Multiply."""
            return x * by


        def other(x):
            return x + 1


        class Layer:
            def forward(self, x):
                return scale(x) + 1

            @staticmethod
            def shape(x):
                return (x,)

            @classmethod
            def build(cls, x):
                return cls, x
    ''',
    "sglang/user.py": """
        from .ops import Layer, other, scale

        TABLE = {"scale": scale}
        CHAIN = [scale, other]
        CHOSEN = {scale}
        KEYED = {scale: "by function", other: "other"}


        class Holder:
            method = scale
            hooks = [scale]
            static = staticmethod(scale)


        def call(x):
            return scale(x), TABLE["scale"](x), CHAIN[0](x), Holder.static(x), Holder.hooks[0](x)
    """,
    "sglang/frozen_user.py": """
        from .ops import scale

        FROZEN = (scale, 1)
    """,
}
TARGETS = [
    Target("sglang.ops", "scale"),
    Target("sglang.ops", "other", patched=False),
    Target("sglang.ops", "Layer.forward"),
    Target("sglang.ops", "Layer.shape"),
    Target("sglang.ops", "Layer.build"),
]

PRELUDE = """
import importlib, pathlib, sys
from dsv41_dist.engine import boot, drift
from dsv41_dist.engine.hook import Hook
from dsv41_dist.engine.state import AdapterState
from dsv41_dist.engine.symbols import Target
drift.FOLDER = pathlib.Path({releases!r})

class Tag:
    guarantee, native = "bit-identical", {{}}
    def __init__(self, name, *qualnames, add=100, relied=(), module="sglang.ops"):
        self.name, self.add = name, add
        self.targets = [Target(module, q) for q in qualnames] + [Target(module, q, patched=False) for q in relied]
    def install(self, patch):
        for qualname in patch.qualnames:
            def make(original):
                def wrapper(*args, **kwargs):
                    patch.state.fire()
                    result = original(*args, **kwargs)
                    return result + self.add if isinstance(result, int) else result
                return wrapper
            patch.wrap(qualname, make)

def armed_hook(*adapters):
    hook = Hook([(a, AdapterState(a.name, a.guarantee)) for a in adapters])
    hook.states = [state for _, state in hook._patchers]
    hook.arm()
    return hook
"""


class Toy:
    """The toy engine in a folder; `run` executes code that finds it as `sglang`."""

    def __init__(self, folder: Path, files: Mapping[str, str] = FILES, releases: Path | None = None) -> None:
        self.folder = folder
        self.root = folder / "engine"
        self.releases = releases or folder / "releases"
        self.releases.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            file = self.root / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(textwrap.dedent(text))
        wheel = folder / "sglang-9.9.1-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            for name in files:
                archive.write(self.root / name, name)
        self.wheel = wheel
        drift.write(folder, TARGETS, self.releases)

    def edit(self, name: str, old: str, new: str) -> None:
        file = self.root / name
        text = file.read_text()
        assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times"
        file.write_text(text.replace(old, new))

    def run(
        self, code: str, env: Mapping[str, str] | None = None, args: tuple[str, ...] = ()
    ) -> subprocess.CompletedProcess:
        file = self.folder / "driver.py"
        file.write_text(PRELUDE.format(releases=str(self.releases)) + textwrap.dedent(code))
        return run_python([*args, str(file)], {"PYTHONPATH": f"{ROOT}:{self.root}", **(env or {})})

    def recorded(self) -> dict:
        return json.loads((self.releases / "9.9.1.json").read_text())


def run_python(args: list[str], env: Mapping[str, str], timeout: float = 60) -> subprocess.CompletedProcess:
    """A fresh interpreter with none of our variables but those given."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("DSV41_", "SPARK_PREFILL_", "PYTHON"))}
    return subprocess.run(
        [sys.executable, *args],
        env={**clean, **env},
        cwd=tempfile.gettempdir(),  # with -c the working folder is importable: it must not be the repository
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
