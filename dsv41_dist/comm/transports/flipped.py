"""A transport that flips one byte of what one rank sends: the seam through which tests show that a wrong byte is found.

It wraps a real transport, so that the real one carries nothing for it. Never made but by name, by a test or by
`bench --flip-byte RANK`.
"""

from __future__ import annotations

import torch

from ..layout import Split
from .base import Transport, as_bytes

__all__ = ["FlippedTransport"]


class FlippedTransport(Transport):
    """`inner`, with one byte of rank `culprit`'s payload inverted on its way: the highest of the first element,
    so that no sum can round it away."""

    name = "flipped"

    def __init__(self, inner: Transport, culprit: int) -> None:
        super().__init__(inner.ranks, inner.watch)
        self._inner = inner
        self._culprit = culprit

    def all_reduce(self, x: torch.Tensor, op: str, out: torch.Tensor) -> None:
        self._inner.all_reduce(self._sent(x), op, out)

    def all_gather_rows(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self._inner.all_gather_rows(self._sent(x), out)

    def all_gather_columns(self, x: torch.Tensor, split: Split, out: torch.Tensor) -> None:
        self._inner.all_gather_columns(self._sent(x), split, out)

    def reduce_scatter(self, x: torch.Tensor, op: str, out: torch.Tensor) -> None:
        self._inner.reduce_scatter(self._sent(x), op, out)

    def broadcast(self, x: torch.Tensor, src: int) -> None:
        sent = self._sent(x)
        self._inner.broadcast(sent, src)
        x.copy_(sent)

    def barrier(self) -> None:
        self._inner.barrier()

    def _sent(self, x: torch.Tensor) -> torch.Tensor:
        if self.ranks.rank != self._culprit:
            return x
        wire = x.clone()
        as_bytes(wire)[x.element_size() - 1] ^= 0xFF
        return wire
