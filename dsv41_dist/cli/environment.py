"""The environment block that every result of this project carries."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .. import __version__
from ..comm.settings import CommSettings

__all__ = ["environment", "rank_facts", "settings_digest"]


def settings_digest(settings: CommSettings) -> str:
    """16 hex digits over everything that must be equal on every rank."""
    return hashlib.sha256(json.dumps(settings.digest_fields(), sort_keys=True).encode()).hexdigest()[:16]


def environment(world_size: int, launcher: str, device: str, settings: CommSettings) -> dict[str, Any]:
    """Versions, host, cores or GPU names and links, world size, commit, settings digest. JSON-able."""
    import torch

    block: dict[str, Any] = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": platform.node(),
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "versions": {
            "dsv41_dist": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": _version("numpy"),
            "mpi4py": _version("mpi4py"),
            "triton": _version("triton"),
            "cupy": _version("cupy-cuda13x"),
            "sglang": _version("sglang"),
        },
        "world_size": world_size,
        "launcher": launcher,
        "device": device,
        "commit": _commit(),
        "code": _code_digest(),
        "settings_digest": settings_digest(settings),
        "nccl_environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith("NCCL_")},
    }
    if device == "cuda":
        block["versions"]["cuda"] = torch.version.cuda
        block["versions"]["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        block["versions"]["driver"] = _ask("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        block["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        links = _ask("nvidia-smi", "topo", "-m", lines=None) or ""
        block["gpu_links"] = re.sub(r"\x1b\[\d*m", "", links).split("\n\nLegend")[0].splitlines()
        block["gpu_clocks"] = _ask(
            "nvidia-smi", "--query-gpu=clocks.sm,clocks.mem", "--format=csv,noheader", lines=None
        )
    return block


def rank_facts(device: str, settings: CommSettings, transport: str) -> dict[str, str]:
    """What one rank says of itself in the preflight table."""
    import torch

    if transport == "mpi":
        from mpi4py import MPI

        backend = MPI.Get_library_version().splitlines()[0].split(",")[0].strip("\0 ")
    elif device == "cuda":
        backend = "NCCL " + ".".join(map(str, torch.cuda.nccl.version()))
    else:
        backend = "gloo"
    name = torch.cuda.get_device_name() if device == "cuda" else f"cpu ({len(os.sched_getaffinity(0))} cores)"
    return {
        "host": platform.node(),
        "pid": str(os.getpid()),
        "package": __version__,
        "code": _code_digest(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "backend": backend,
        "device": name,
        "settings": settings_digest(settings),
    }


def _code_digest() -> str:
    """8 hex digits over the package's own source: two checkouts with the same version may still differ."""
    root = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:8]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    root = Path(__file__).resolve().parent.parent.parent
    if not (root / ".git").exists():
        return None
    commit = _ask("git", "-C", str(root), "rev-parse", "HEAD")
    changed = _ask("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no")
    return f"{commit}+changes" if commit and changed else commit


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()


def _ask(*command: str, lines: int | None = 1) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode:
        return None
    text = done.stdout.strip()
    return "\n".join(text.splitlines()[:lines]) if lines else text
