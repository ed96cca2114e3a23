"""What became of each enabled adapter in this process. Torch-free; the hot path is one integer increment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["AdapterState"]


class AdapterState:
    """Filled by the hook (patched, rebound), by the adapter's runtime (fired, memory_bytes) and read by the report."""

    def __init__(self, name: str, guarantee: str, native: str | None = None) -> None:
        self.name = name
        self.guarantee = guarantee
        self.native = native  # the engine's own flag, when the release needs no patch
        self.patched: dict[str, int] = {}  # target key -> how often it was patched (again after a reload)
        self.rebound = 0  # stale `from x import f` copies that now hold the patched function
        self.fired = 0
        self._memory: dict[str, int] = {}
        self.notes: list[str] = []
        self.on_first_fire: Callable[[], None] | None = None

    def fire(self) -> None:
        """Called by an adapter's runtime each time it did its work instead of the stock path."""
        self.fired += 1
        if self.fired == 1 and self.on_first_fire is not None:
            self.on_first_fire()

    def holds(self, part: str, memory_bytes: int) -> None:
        """Report what one part of the adapter's memory comes to, in bytes on this rank; the largest report counts."""
        self._memory[part] = max(self._memory.get(part, 0), memory_bytes)

    @property
    def memory_bytes(self) -> int:
        """What the adapter costs at its peak: the sum over its parts."""
        return sum(self._memory.values())

    def status(self, ended: bool = False) -> str:
        """native, armed (its modules were not imported), installed, fired, or never fired once serving has ended."""
        if self.native is not None:
            return "native"
        if self.fired:
            return "fired"
        if not self.patched:
            return "armed"
        return "never fired" if ended else "installed"

    def as_json(self, ended: bool = False) -> dict[str, Any]:
        return {
            "adapter": self.name,
            "guarantee": self.guarantee,
            "state": self.status(ended),
            "native_flag": self.native,
            "patched": sorted(self.patched),
            "rebound_copies": self.rebound,
            "fired": self.fired,
            "memory_bytes": self.memory_bytes,
            "notes": list(self.notes),
        }
