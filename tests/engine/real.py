"""Running code with the real engine."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

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
