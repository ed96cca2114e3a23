"""CUDA under the peer kernels: memory that other processes can open, compiled kernels, launches on torch's current stream.

Memory is one cudaMalloc per rank, opened by the other processes through its CUDA IPC handle: peer addresses and nothing
else, so NVLink multicast has no part in it, ranks may share a GPU, and what is exchanged is a blob of bytes.
"""

from __future__ import annotations

import ctypes
import os
import struct
from importlib.resources import files
from typing import Any

import torch

from .peer import Args

__all__ = ["CudaDevice", "missing"]

_HANDLE_BYTES = 64
_NATIVE_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED: links that are NVLink, not PCIe


def missing(device: torch.device) -> str | None:
    """What keeps the kernels from running on this device, with what to do; None when nothing does. Never raises."""
    if device.type != "cuda":
        return f"it needs CUDA tensors, the group's data is on {device.type}"
    try:
        import cupy  # noqa: F401
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
        import cupy
        from cupy.cuda import driver, runtime

        self._cupy, self._driver, self._runtime = cupy, driver, runtime
        self.index = torch.cuda.current_device() if device.index is None else device.index
        self._record = torch.zeros(8, dtype=torch.int64, pin_memory=True)
        self._words: Any = self._record.numpy()
        self.host_record = self._record.data_ptr()
        self._arena = 0
        self._opened: list[int] = []
        self._params = (ctypes.c_void_p * 1)()
        folder = files(__package__)
        source = (folder / "peer_device.cuh").read_text() + (folder / "peer.cu").read_text()
        with cupy.cuda.Device(self.index):
            module = cupy.RawModule(code=source, options=("-std=c++17", f"-DWORLD={world}"))
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
        """What another process needs to open the arena, and to judge the link to it."""
        with self._cupy.cuda.Device(self.index):
            handle = bytes(self._runtime.ipcGetMemHandle(self._arena))
            bus = self._runtime.deviceGetPCIBusId(self.index).encode()
        return struct.pack("=qQ64s32s", os.getpid(), self._arena, handle, bus)

    def open(self, blob: bytes) -> int:
        """The address of another rank's arena here. The same process (several ranks in one) uses it directly."""
        pid, address, handle, _ = struct.unpack("=qQ64s32s", blob)
        if pid == os.getpid():
            return address
        with self._cupy.cuda.Device(self.index):
            opened = self._runtime.ipcOpenMemHandle(handle, self._runtime.cudaIpcMemLazyEnablePeerAccess)
        self._opened.append(opened)
        return opened

    def whole_lines(self, blob: bytes) -> bool:
        """Whether the link to that rank's GPU is NVLink (or none is needed), which delivers 128-byte stores whole."""
        bus = struct.unpack("=qQ64s32s", blob)[3].rstrip(b"\0").decode()
        if bus == self._runtime.deviceGetPCIBusId(self.index):
            return True
        try:
            other = self._runtime.deviceGetByPCIBusId(bus)
        except Exception:
            return False  # hidden by CUDA_VISIBLE_DEVICES: its link cannot be asked for
        value = ctypes.c_int(0)
        status = ctypes.CDLL("libcuda.so.1").cuDeviceGetP2PAttribute(
            ctypes.byref(value), _NATIVE_ATOMICS, self.index, other
        )
        return status == 0 and value.value == 1

    def launch(self, name: str, grid: int, block: int, args: Args) -> None:
        self._params[0] = ctypes.addressof(args)
        stream = torch.cuda.current_stream(self.index).cuda_stream
        self._driver.launchKernel(
            self._kernels[name], grid, 1, 1, block, 1, 1, 0, stream, ctypes.addressof(self._params), 0
        )

    def record(self) -> list[int]:
        """The host record: 8 reports by reporting rank (0: none), kind + 1, 0, sequence. No synchronisation."""
        words = self._words.view("uint32")
        return [int(word) for word in words[:9]] + [0, int(self._words[5])]

    def set_sequence(self, offset: int, value: int) -> None:
        """Write a sequence of the own arena (tests start near 2^32). Before the first launch, on every rank."""
        word = ctypes.c_uint64(value)
        self._runtime.memcpy(self._arena + offset, ctypes.addressof(word), 8, self._runtime.memcpyHostToDevice)

    def sequence(self, offset: int) -> int:
        word = ctypes.c_uint64(0)
        self._runtime.memcpy(ctypes.addressof(word), self._arena + offset, 8, self._runtime.memcpyDeviceToHost)
        return word.value

    def close(self) -> None:
        """Unmap the others' arenas and free the own one. The kernels' waits are bounded, and so is this."""
        with self._cupy.cuda.Device(self.index):
            for address in self._opened:
                self._runtime.ipcCloseMemHandle(address)
            self._opened.clear()
            if self._arena:
                self._runtime.free(self._arena)
                self._arena = 0


def _kernel_names() -> list[str]:
    small = ("packet", "line", "bulk")
    return [f"copy_{p}" for p in small] + [f"sum_{p}_{t}" for p in small for t in ("fp16", "bf16", "fp32")]
