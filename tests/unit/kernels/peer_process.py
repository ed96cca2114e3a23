"""A stand-in GPU for PeerTransport: the real kernels on a CPU, arenas in files that all processes of a test map."""

from __future__ import annotations

import ctypes
import os
import tempfile
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist

from dsv41_dist.comm.transports.peer import PeerTransport
from dsv41_dist.kernels.peer import Args

from ..stand_in_ranks import mapped
from .peer_host import Launch, library, zeros


class ProcessDevice:
    """The interface of CudaDevice. A launch runs at once, to its end: a stream that the host waits for."""

    #: what a test wants to go wrong on this rank: "allocate", "open", or nothing
    fault: ClassVar[str] = ""
    #: whether all links carry whole lines, as NVLink does and PCIe does not
    lines: ClassVar[bool] = True
    #: ranks whose GPU this process does not see
    hidden: ClassVar[tuple[int, ...]] = ()

    #: every device of this process
    made: ClassVar[list[ProcessDevice]] = []

    def __init__(self, device: torch.device, world: int) -> None:
        self.made.append(self)
        self._library = library(world)
        self.threads = 512  # so plans have few blocks: a fiber costs more than a CUDA thread
        self._record = zeros(64)
        self.host_record = self._record.ctypes.data
        self._maps: list[Any] = []
        self._path = ""
        self.launches: list[str] = []
        self.freed: bool | None = None
        self.skip = 0  # launches to leave out, as a rank does that does not replay its graph

    def allocate(self, nbytes: int) -> int:
        if self.fault == "allocate":
            raise MemoryError("the test's GPU is full")
        handle, self._path = tempfile.mkstemp(prefix="dsv41-arena-", dir="/dev/shm")
        os.ftruncate(handle, nbytes)
        os.close(handle)
        return self._map(self._path)

    def _map(self, path: str) -> int:
        held = mapped(path)
        self._maps.append(held)
        return held.ctypes.data

    def export(self) -> bytes:
        return self._path.encode()

    def open(self, blob: bytes) -> int:
        if self.fault == "open":
            raise OSError("the test's handle does not open")
        return self._map(blob.decode())

    def identity(self) -> str:
        return f"cpu {dist.get_rank()}"

    def visible(self) -> list[str]:
        return [f"cpu {rank}" for rank in range(dist.get_world_size()) if rank not in self.hidden]

    def whole_lines(self) -> bool:
        return self.lines

    def launch(self, name: str, grid: int, block: int, args: Args) -> None:
        if self.skip:
            self.skip -= 1
            return
        self.launches.append(name)
        job = Launch(name.encode(), grid, min(block, 64), args)
        counts, queues = (ctypes.c_uint32 * 1)(1), (ctypes.POINTER(Launch) * 1)(ctypes.pointer(job))
        assert self._library.run_queues(1, counts, queues, ctypes.c_uint64(os.getpid()), ctypes.c_uint64(0)) == 0

    def poisoned(self) -> bool:
        return bool(self._record[:32].any())

    def record(self) -> tuple[list[int], int, int]:
        words = self._record[:36].view(np.uint32)
        return [int(word) for word in words[:8]], int(words[8]) - 1, int(self._record[40:48].view(np.uint64)[0])

    def write_word(self, address: int, value: int) -> None:
        ctypes.c_uint64.from_address(address).value = value

    def read_word(self, address: int) -> int:
        return ctypes.c_uint64.from_address(address).value

    def synchronize(self) -> None:
        """Nothing is ever under way."""

    def unmap(self) -> None:
        del self._maps[1:]

    def close(self, *, free: bool) -> None:
        self.unmap()
        self.freed = free
        self.forget()

    def forget(self) -> None:
        """Leave no file behind. What is mapped stays."""
        if self._path:
            os.unlink(self._path)
        self._path = ""


class HostPeerTransport(PeerTransport):
    """PeerTransport over the stand-in."""

    missing = staticmethod(lambda device: None)
    make_device = ProcessDevice

    @staticmethod
    def clean() -> None:
        for device in ProcessDevice.made:
            device.forget()
