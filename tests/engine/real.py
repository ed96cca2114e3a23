"""Running code with the real engine."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
DOOR = ROOT / "dsv41_dist" / "sitecustomize"
RELEASES = ("0.5.21", "0.5.22", "0.5.23")


def engine_env(tree: Path, door: bool = True, **extra: str) -> dict[str, str]:
    """An environment in which the engine of `tree` is imported; with the sitecustomize door unless told otherwise."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("DSV41_", "SPARK_PREFILL_", "PYTHON", "SGLANG_"))}
    # The stand-in comes last: where torchvision's binary fits the installed torch, the real one is used.
    stand_ins = ROOT / "dsv41_dist" / "rehearsal" / "modules"
    paths = [*([str(DOOR)] if door else []), str(ROOT), str(tree), str(stand_ins)]
    return {
        **clean,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
        "TRITON_INTERPRET": "1",
        **extra,
    }


def run_engine(
    python: str, args: list[str], env: Mapping[str, str], timeout: float = 150
) -> subprocess.CompletedProcess:
    return subprocess.run([python, *args], env=env, capture_output=True, text=True, timeout=timeout, check=False)


def scenes(
    python: str, published: Callable[[str], Path], probe: str, of: Mapping[str, list[str]], **extra: str
) -> Callable[[str, str], Any]:
    """release, scene -> what `probe` printed of it: what each rank saw. All scenes of a release, `of` it, run in one
    process: one import of the engine."""
    seen: dict[str, Any] = {}

    def run(release: str, scene: str) -> Any:
        if release not in seen:
            env = engine_env(published(release), **extra)
            result = run_engine(python, [str(HERE / probe), *of[release]], env, timeout=480)
            assert result.returncode == 0, result.stderr[-4000:]
            seen[release] = json.loads(result.stdout.splitlines()[-1])
        return seen[release][scene]

    return run
