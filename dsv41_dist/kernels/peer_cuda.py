"""CUDA under the peer kernels: memory other processes can open, compiled kernels, launches on torch's current stream.

Memory is one cudaMalloc per rank, opened by the other processes through its CUDA IPC handle: peer addresses and nothing
else, so NVLink multicast has no part in it, ranks may share a GPU, and what is exchanged is a blob of bytes.
"""

from __future__ import annotations

import ctypes
import os
import struct
from contextlib import suppress
from importlib import import_module
from importlib.resources import files
from typing import Any

import torch

from .peer import Args, source

__all__ = ["CudaDevice", "missing"]

_NATIVE_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED: links that are NVLink, not PCIe


def missing(device: torch.device) -> str | None:
    """What keeps the kernels from running on this device, with what to do; None when nothing does. Never raises."""
    if device.type != "cuda":
        return f"it needs CUDA tensors, the group's data is on {device.type}"
    try:
        import_module("cupy")
    except Exception as error:
        return f"cupy does not import ({type(error).__name__}: {error}): pip install 'dsv41-dist[gpu]'"
    try:
        major, minor = torch.cuda.get_device_capability(device)
    except Exception as error:
        return f"{device} cannot be asked for its capability ({error})"
    if major < 8:
        return f"{torch.cuda.get_device_name(device)} is sm_{major}{minor}: sm_80 or newer is needed"
    return None


class CudaDevice:
    """One GPU, seen from one rank."""

    def __init__(self, device: torch.device, world: int) -> None:
        # By name: cupy is an extra, and has no types.
        cupy: Any = import_module("cupy")
        self._cupy, self._driver, self._runtime = cupy, cupy.cuda.driver, cupy.cuda.runtime
        self.index: int = torch.cuda.current_device() if str(device) == "cuda" else device.index
        #: of 64 registers at most, so every multiprocessor holds 1024 of them
        self.threads = 1024 * torch.cuda.get_device_properties(self.index).multi_processor_count
        self._record = torch.zeros(8, dtype=torch.int64, device="cpu", pin_memory=True)
        self._words: Any = self._record.numpy().data
        self.host_record = self._record.data_ptr()
        self._arena = 0
        self._stream: torch.cuda.Stream | None = None
        self._opened: list[int] = []
        self._params = (ctypes.c_void_p * 1)()
        code = (files("dsv41_dist.kernels") / "peer_device.cuh").read_text() + source()
        with cupy.cuda.Device(self.index):
            module = cupy.RawModule(code=code, options=("-std=c++17", f"-DWORLD={world}"))
            self._module = module
            self._kernels = {name: module.get_function(name).kernel.ptr for name in _kernel_names()}

    def allocate(self, nbytes: int) -> int:
        """nbytes of zeros that other processes can open. Returns when they are zero."""
        with self._cupy.cuda.Device(self.index):
            self._arena = self._runtime.malloc(nbytes)
            self._runtime.memset(self._arena, 0, nbytes)
            self._runtime.deviceSynchronize()
        return self._arena

    def export(self) -> bytes:
        """What another process needs to open the arena, and which GPU it is on."""
        with self._cupy.cuda.Device(self.index):
            handle = bytes(self._runtime.ipcGetMemHandle(self._arena))
        return struct.pack("=qQ64s", os.getpid(), self._arena, handle)

    def open(self, blob: bytes) -> int:
        """The address of another rank's arena here. The same process (several ranks in one) uses it directly."""
        pid, address, handle = struct.unpack("=qQ64s", blob)
        if pid == os.getpid():
            return address
        with self._cupy.cuda.Device(self.index):
            opened = self._runtime.ipcOpenMemHandle(handle, self._runtime.cudaIpcMemLazyEnablePeerAccess)
        self._opened.append(opened)
        return opened

    def identity(self) -> str:
        """The GPU, the same string for every process of the host."""
        return self._runtime.deviceGetPCIBusId(self.index)

    def visible(self) -> list[str]:
        """Every GPU that this process sees, by the strings of `identity`."""
        return [self._runtime.deviceGetPCIBusId(index) for index in range(self._runtime.getDeviceCount())]

    def whole_lines(self) -> bool:
        """Whether all GPUs this process sees are joined by NVLink, which delivers 128-byte stores whole."""
        count = self._runtime.getDeviceCount()
        query = ctypes.CDLL("libcuda.so.1").cuDeviceGetP2PAttribute
        for one in range(count):
            for other in range(count):
                value = ctypes.c_int(0)
                if one != other and (query(ctypes.byref(value), _NATIVE_ATOMICS, one, other) != 0 or not value.value):
                    return False
        return count > 1

    def launch(self, name: str, grid: int, block: int, args: Args) -> None:
        """On torch's current stream, after whatever this device was last given on another one.

        Raises RuntimeError when one capture uses two streams: its calls would have no order.
        """
        stream = torch.cuda.current_stream(self.index)
        handle = stream.cuda_stream
        if self._stream is None or handle != self._stream.cuda_stream:
            self._follow(stream)
        self._params[0] = ctypes.addressof(args)
        self._driver.launchKernel(
            self._kernels[name], grid, 1, 1, block, 1, 1, 0, handle, ctypes.addressof(self._params), 0
        )

    def _follow(self, stream: torch.cuda.Stream) -> None:
        last = self._stream
        if last is not None and self._captures(last):
            raise RuntimeError(
                "peer: calls of one communicator on two streams while one of them is being captured into a graph: "
                "within a capture all its calls belong on one stream"
            )
        if last is not None and not self._captures(stream):
            stream.wait_stream(last)
        self._stream = stream

    def _captures(self, stream: torch.cuda.Stream) -> bool:
        # The default stream is never captured, and must not be asked while another one is.
        return stream.cuda_stream != 0 and bool(self._runtime.streamIsCapturing(stream.cuda_stream))

    def poisoned(self) -> bool:
        """Whether a kernel has reported a failure. Reads host memory; no synchronisation."""
        words = self._words
        return bool(words[0] | words[1] | words[2] | words[3])

    def record(self) -> tuple[list[int], int, int]:
        """(report of each rank, 0 when it made none; kind of the call; its sequence)."""
        words = self._record.numpy().view("uint32")
        return [int(word) for word in words[:8]], int(words[8]) - 1, int(self._words[5])

    def write_word(self, address: int, value: int) -> None:
        """Write 64 bits to an arena, from the host; not ordered with kernels that are running."""
        word = ctypes.c_uint64(value)
        self._runtime.memcpy(address, ctypes.addressof(word), 8, self._runtime.memcpyHostToDevice)

    def read_word(self, address: int) -> int:
        word = ctypes.c_uint64(0)
        self._runtime.memcpy(ctypes.addressof(word), address, 8, self._runtime.memcpyDeviceToHost)
        return word.value

    def synchronize(self) -> None:
        """Wait for this device. Bounded, because the kernels' waits are."""
        torch.cuda.synchronize(self.index)

    def unmap(self) -> None:
        """Let go of the others' arenas. Never raises: a context that is gone holds nothing."""
        with self._cupy.cuda.Device(self.index), suppress(Exception):
            while self._opened:
                self._runtime.ipcCloseMemHandle(self._opened.pop())

    def close(self, *, free: bool) -> None:
        """Unmap the others' arenas. The own one is freed when nobody can be using it, else by the process's end."""
        self.unmap()
        if self._arena and free:
            with self._cupy.cuda.Device(self.index):
                self._runtime.free(self._arena)
        self._arena = 0


def _kernel_names() -> list[str]:
    small = ("packet", "line", "bulk")
    return [f"copy_{p}" for p in small] + [f"sum_{p}_{t}" for p in small for t in ("fp16", "bf16", "fp32")]
