"""The real kernels on a CPU: compiled by g++ with peer_host.h in place of the CUDA header, all ranks in one process."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import torch

from dsv41_dist.kernels.peer import Args, Group, Layout, source

HERE = Path(__file__).parent
_MARGIN, _PATTERN = 256, 0xA5
_libraries: dict[int, ctypes.CDLL] = {}


class Launch(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("grid", ctypes.c_uint32), ("block", ctypes.c_uint32), ("args", Args)]


def library(world: int, edit: tuple[str, str] | None = None) -> ctypes.CDLL:
    """The kernels for `world` ranks as a shared library, built once. `edit` plants a fault in the source (old, new)."""
    if edit is None and world in _libraries:
        return _libraries[world]
    kernels = source()
    if edit is not None:
        assert edit[0] in kernels, "the planted fault does not match the source any more"
        kernels = kernels.replace(*edit)
    text = (HERE / "peer_host.h").read_text() + kernels + (HERE / "peer_host_main.h").read_text()
    digest = hashlib.sha256(f"{world}{text}".encode()).hexdigest()[:16]
    built = Path(tempfile.gettempdir()) / f"dsv41-peer-host-{os.getuid()}-{digest}.so"
    if not built.exists():
        with tempfile.TemporaryDirectory() as folder:
            code, made = Path(folder) / "peer.cpp", Path(folder) / "peer.so"
            code.write_text(text)
            trap = ["-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"]
            flags = ["-std=c++17", "-O1", "-w", *trap, f"-DWORLD={world}", "-shared", "-fPIC"]
            command = ["g++", *flags, "-o", made, code]
            subprocess.run([str(part) for part in command], check=True, timeout=120)
            os.replace(made, f"{built}.{os.getpid()}")
            os.replace(f"{built}.{os.getpid()}", built)
    loaded = ctypes.CDLL(str(built))
    assert loaded.args_bytes() == ctypes.sizeof(Args), "Args differs between peer.py and peer.cu"
    assert loaded.launch_bytes() == ctypes.sizeof(Launch)
    if edit is None:
        _libraries[world] = loaded
    return loaded


def zeros(nbytes: int) -> np.ndarray:
    """Zeroed bytes at a multiple of 128."""
    raw = np.zeros(nbytes + 128, dtype=np.uint8)
    skip = -raw.ctypes.data % 128
    return raw[skip : skip + nbytes]


class QueueDevice:
    """A rank's stream: launches are put down, and run together with the other ranks' by Host.run."""

    def __init__(self) -> None:
        self.record_bytes = zeros(64)
        self.host_record = self.record_bytes.ctypes.data
        self.queue: list[Launch] = []

    def launch(self, name: str, grid: int, block: int, args: Args) -> None:
        copy = Args.from_buffer_copy(bytes(args))
        self.queue.append(Launch(name.encode(), grid, block, copy))

    def reports(self) -> list[int]:
        return [int(word) for word in self.record_bytes[:32].view(np.uint32)]


class Host:
    """`world` ranks in this process."""

    def __init__(self, layout: Layout, first: int = 0, edit: tuple[str, str] | None = None) -> None:
        self.layout, self.world = layout, layout.world
        self.protocols = ["packet", "line", "bulk"]  # that a test draws from
        self.library = library(layout.world, edit)
        self.arenas = [zeros(layout.nbytes) for _ in range(layout.world)]
        for arena in self.arenas:
            for kind in range(3):
                at = layout.control(kind)
                arena[at : at + 8].view(np.uint64)[0] = first
        self.devices = [QueueDevice() for _ in range(layout.world)]
        addresses = [arena.ctypes.data for arena in self.arenas]
        self.groups = [Group(rank, addresses, layout, self.devices[rank]) for rank in range(layout.world)]

    def sequence(self, rank: int, kind: int) -> int:
        at = self.layout.control(kind)
        return int(self.arenas[rank][at : at + 8].view(np.uint64)[0])

    def run(self, seed: int = 1, steps: int = 3_000_000) -> bool:
        """Run what the ranks have queued, in an order drawn from seed. False when it did not end."""
        counts = (ctypes.c_uint32 * self.world)(*(len(device.queue) for device in self.devices))
        queues = [(Launch * max(1, len(device.queue)))(*device.queue) for device in self.devices]
        pointers = (ctypes.POINTER(Launch) * self.world)(*(ctypes.cast(q, ctypes.POINTER(Launch)) for q in queues))
        status = self.library.run_queues(self.world, counts, pointers, ctypes.c_uint64(seed), ctypes.c_uint64(steps))
        for device in self.devices:
            device.queue.clear()
        return status == 0


def misaligned(x: torch.Tensor, by: int) -> torch.Tensor:
    """The same values, `by` bytes past a multiple of 128 (by must be a multiple of the item size), between margins."""
    raw = torch.from_numpy(zeros(x.nbytes + 2 * _MARGIN))
    raw.fill_(_PATTERN)
    held = raw[_MARGIN + by : _MARGIN + by + x.nbytes].view(x.dtype).view(x.shape)
    held.copy_(x)
    return held


def margins_are_whole(held: torch.Tensor) -> bool:
    """Whether nothing was written outside a tensor of `misaligned`."""
    raw = torch.empty(0, dtype=torch.uint8).set_(held.untyped_storage())
    at = held.storage_offset() * held.element_size()
    return bool((raw[:at] == _PATTERN).all() and (raw[at + held.nbytes :] == _PATTERN).all())
