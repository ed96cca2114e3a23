"""How much memory a piece of work takes beyond what was there before it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

__all__ = ["PeakMemory"]

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class PeakMemory:
    """A context: afterwards `bytes` is the peak above the start; None where that cannot be told.

    CUDA: torch's allocator on that device. CPU: the process' resident set on Linux, which memory that the allocator
    kept from before makes smaller.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.bytes: int | None = None

    def __enter__(self) -> PeakMemory:
        self._before: int | None
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = torch.cuda.memory_allocated(self._device)
        else:
            try:
                _CLEAR.write_text("5")  # the high-water mark starts again (proc(5))
            except OSError:
                self._before = None
            else:
                self._before = _kilobytes("VmRSS")
        return self

    def __exit__(self, *_: Any) -> None:
        if self._before is None:
            return
        if self._device.type == "cuda":
            self.bytes = torch.cuda.max_memory_allocated(self._device) - self._before
        else:
            peak = _kilobytes("VmHWM")
            self.bytes = None if peak is None else max(0, peak - self._before)


def _kilobytes(name: str) -> int | None:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    return None
