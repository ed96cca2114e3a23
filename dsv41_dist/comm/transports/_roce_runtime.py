"""b12x's RoCEnante, found by its signatures: version numbers say nothing (API_VERSION is 1 on surfaces that differ).

`SURFACE` is everything this project calls. `find` compares it with what is installed and refuses, saying what it found,
when a parameter is missing; a test compares it with the source of the published wheels.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from ..errors import TransportUnavailable

__all__ = ["COUNTERS", "SURFACE", "Library", "changed", "error_counters", "find", "missing"]

_ADVICE = "pip install 'b12x>=1.5' (1.5.0 is the first release with comm.roce)"
#: module, qualified name, and the parameters it must have.
SURFACE: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (
        "b12x.comm.roce.roce_oneshot",
        "RoceOneshotAllReduce.__init__",
        ("exchange_group", "device", "max_size", "max_gather_bytes", "hca_names", "gid_index"),
    ),
    ("b12x.comm.roce.roce_oneshot", "RoceOneshotAllReduce.all_reduce", ("inp", "out", "plan")),
    ("b12x.comm.roce.roce_oneshot", "RoceOneshotAllReduce.all_gather", ("inp", "dim", "out", "plan")),
    ("b12x.comm.roce.roce_oneshot", "RoceOneshotAllReduce.check_health", ()),
    ("b12x.comm.roce.roce_oneshot", "RoceOneshotAllReduce.poisoned", ()),
    ("b12x.comm.roce.roce_oneshot", "RoceOneshotAllReduce.stats", ()),
    ("b12x.comm.roce.roce_oneshot", "RoceOneshotAllReduce.close", ()),
    (
        "b12x.comm.roce._preparation",
        "query_from_runtime",
        ("runtime", "surface", "call", "topology", "peer_hosts"),
    ),
    ("b12x.comm.roce._preparation", "plan", ("query", "runtime")),
    ("b12x.comm.roce._proxy", "load", ()),
    ("b12x.preparation.session", "PreparationSession.__init__", ("device", "autotune", "compile_workers")),
    ("b12x.preparation.session", "PreparationSession.prepare", ("requests",)),
    ("b12x.preparation.session", "PreparationSession.close", ()),
    ("b12x.preparation.types", "PreparedCall", ("run",)),
    ("b12x.preparation.types", "Plan.request", ("name", "prepare_call")),
)
#: Per-port counters that move when packets are lost; what the driver calls them differs.
COUNTERS = (
    "packet_seq_err",
    "out_of_sequence",
    "local_ack_timeout_err",
    "rnr_nak_retry_err",
    "req_transport_retries_exceeded",
    "roce_adp_retrans",
)


@dataclass(frozen=True)
class Library:
    """What `find` found. `source` tells builds apart; `bound` is "time" or "polls": what ends a wait on the device."""

    version: str
    source: str
    bound: str
    runtime: Any
    plan: Callable[..., Any]
    query: Callable[..., Any]
    session: Any
    call: Any
    build_proxy: Callable[[], Any]
    try_memory: Callable[[torch.device, int], None]


def missing(device: torch.device) -> str | None:
    """What keeps the runtime from this device, or None."""
    return None if device.type == "cuda" else f"it needs CUDA tensors, the group's data is on {device.type}"


def find() -> Library:
    """Import b12x and check its surface. Raises TransportUnavailable with what was found and what to do."""
    try:
        release = version("b12x")
    except PackageNotFoundError:
        raise TransportUnavailable("roce", f"b12x is not installed: {_ADVICE}") from None
    found: dict[str, Any] = {}
    try:
        if find_spec("b12x.comm") is None or find_spec("b12x.comm.roce") is None:
            raise TransportUnavailable("roce", f"b12x {release} has no comm.roce: {_ADVICE}")
        for module, name, _ in SURFACE:
            found[name] = _resolve(import_module(module), name)
    except ImportError as error:
        reason = f"b12x {release} does not import ({error}): install what `pip check` says it lacks"
        raise TransportUnavailable("roce", reason) from None
    reason = changed({name: _parameters(value) for name, value in found.items()})
    if reason:
        raise TransportUnavailable("roce", f"b12x {release}: {reason}")
    runtime = _resolve(import_module(SURFACE[0][0]), "RoceOneshotAllReduce")
    text = "".join(_sources(Path(inspect.getfile(runtime)).parent))
    return Library(
        version=release,
        source=hashlib.sha256(text.encode()).hexdigest()[:16],
        bound="time" if "B12X_ROCE_TIMEOUT_MS" in text else "polls",
        runtime=runtime,
        plan=found["plan"],
        query=found["query_from_runtime"],
        session=_resolve(import_module("b12x.preparation.session"), "PreparationSession"),
        call=found["PreparedCall"],
        build_proxy=found["load"],
        try_memory=_try_memory,
    )


def changed(parameters: dict[str, Sequence[str] | None]) -> str | None:
    """Why a surface (qualified name -> its parameters, None when it is not there) is not the one that is served."""
    if parameters.get("RoceOneshotAllReduce.all_gather") and "plan" not in (
        parameters["RoceOneshotAllReduce.all_gather"] or ()
    ):
        return f"its all_gather takes no plan=, so it is older than the published 1.5 releases: {_ADVICE}"
    for _, name, wanted in SURFACE:
        has = parameters.get(name)
        if has is None:
            return f"{name} is not there: its surface has changed; {_ADVICE}"
        lacking = [one for one in wanted if one not in has]
        if lacking:
            return f"{name}({', '.join(has)}) lacks {', '.join(lacking)}: its surface has changed; {_ADVICE}"
    return None


def error_counters(root: Path, names: Sequence[str]) -> dict[str, int]:
    """The loss counters of port 1 of these devices, as far as the driver has them."""
    out: dict[str, int] = {}
    for name in names:
        for counter in COUNTERS:
            path = root / "sys/class/infiniband" / name / "ports/1/hw_counters" / counter
            try:
                out[f"{name} {counter}"] = int(path.read_text())
            except (OSError, ValueError):
                continue
    return out


def _resolve(module: Any, name: str) -> Any:
    value = module
    for part in name.split("."):
        value = getattr(value, part, None)
    return value


def _parameters(value: Any) -> tuple[str, ...] | None:
    if value is None:
        return None
    return tuple(inspect.signature(value).parameters) if callable(value) else ()


def _sources(folder: Path) -> list[str]:
    return [path.read_text() for path in sorted(folder.iterdir()) if path.suffix in (".py", ".c")]


def _try_memory(device: torch.device, nbytes: int) -> None:
    """Pin as much as the runtime will, and give it back: torch keeps the block, so the runtime's own cannot fail.

    The NIC's writes reach the kernel only if the device addresses host memory as the host does.
    """
    cudart: Any = import_module("cuda.bindings.runtime")
    with torch.cuda.device(device):
        block = torch.zeros(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        error, pointer = cudart.cudaHostGetDevicePointer(block.data_ptr(), 0)
    if int(error) != 0 or int(pointer) != block.data_ptr():
        raise MemoryError(f"pinned memory at {block.data_ptr():#x} is {pointer} on {device} (error {int(error)})")
