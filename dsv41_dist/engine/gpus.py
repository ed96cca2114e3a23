"""Compute capabilities of this host's GPUs, before torch is there: from the driver's management library (NVML), which
makes no CUDA context and is safe in a process that forks later. Torch-free."""

from __future__ import annotations

import ctypes

__all__ = ["compute_capabilities"]


def compute_capabilities() -> list[tuple[int, int]]:
    """(major, minor) of every NVIDIA GPU of the host, whatever CUDA_VISIBLE_DEVICES says; [] without a driver."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return []
    if nvml.nvmlInit_v2() != 0:
        return []
    try:
        count = ctypes.c_uint(0)
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return []
        out: list[tuple[int, int]] = []
        for index in range(count.value):
            device, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
            if nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device)) != 0:
                continue
            known = nvml.nvmlDeviceGetCudaComputeCapability(device, ctypes.byref(major), ctypes.byref(minor))
            if known == 0:
                out.append((major.value, minor.value))
        return out
    finally:
        nvml.nvmlShutdown()
