"""The live lengths of verify_cap, as the gates, the accept functions and router_live see them. One per process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

__all__ = ["LIVE", "LiveCutoff", "LiveState"]


class LiveCutoff(NamedTuple):
    """Stands where the engine passes a RaggedVerifyLayout, of which the accept reads one field.

    `verify_lens`: int32 [bs], live rows of each request (verified drafts + 1), from 2 to the stride.
    """

    verify_lens: torch.Tensor


class LiveState:
    """Live rows of every request slot, int32 in a buffer whose address CUDA graphs bake in.

    Written every step by the draft (in its graph's tail, or eagerly), read by the verify that follows.
    """

    def __init__(self) -> None:
        self.buffer: torch.Tensor | None = None
        self.stride = 0
        self._overflow: torch.Tensor | None = None
        self._scope: torch.Tensor | None = None
        self.routed = 0  # gates that took part in the current scope

    def allocate(self, max_bs: int, stride: int, rows: int, device: torch.device | str) -> None:
        """A buffer for `max_bs` requests, all with `rows` live rows. Outside any capture."""
        import torch

        self.buffer = torch.full((max_bs,), rows, dtype=torch.int32, device=device)
        self._overflow = None
        self._initial = rows
        self.stride = stride

    def rows(self, bs: int) -> torch.Tensor:
        """The live rows of the first `bs` slots: a view of the one buffer, or of a second one for a batch that is
        larger than any graph (and so runs eagerly from the draft to the accept)."""
        if self.buffer is None:
            raise RuntimeError("verify_cap: live rows are asked for before the DSpark worker was built")
        if bs <= self.buffer.numel():
            return self.buffer[:bs]
        if self._overflow is None or self._overflow.numel() < bs:
            self._overflow = self.buffer.new_full((bs,), self._initial)
        return self._overflow[:bs]

    @contextmanager
    def scope(self, bs: int) -> Iterator[None]:
        """While the target verifies `bs` requests: gates route dead rows by their anchors."""
        self._scope, self.routed = self.rows(bs), 0
        try:
            yield
        finally:
            self._scope = None

    def of(self, rows: int) -> torch.Tensor | None:
        """The live rows to route by, when a gate of `rows` rows runs inside a scope of as many; counts the gate."""
        if self._scope is None or rows != self._scope.numel() * self.stride:
            return None
        self.routed += 1
        return self._scope


LIVE = LiveState()
