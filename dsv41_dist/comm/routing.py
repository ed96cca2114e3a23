"""Which transport carries which call. A route follows from what every rank knows to be equal and from nothing else."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .errors import ArgumentError
from .transports import OPS, TRANSPORTS

__all__ = ["Route", "RouteTable"]


@dataclass(frozen=True)
class Route:
    """Calls of `op` of at most `max_bytes` (None: any size) go over `transport`.

    Bytes are those one rank sends: x for all_reduce, reduce_scatter and broadcast, the shard for all_gather, rows times
    the widest shard for all_gather_columns.
    """

    op: str
    max_bytes: int | None
    transport: str


@dataclass(frozen=True)
class RouteTable:
    """Routes in order of size, and the transport for everything they do not cover. Never changes after start."""

    fallback: str
    routes: tuple[Route, ...] = ()

    def __post_init__(self) -> None:
        for route in self.routes:
            if route.op not in OPS:
                raise ArgumentError(f"route op={route.op!r}: allowed is {', '.join(OPS)}")
        for name in (self.fallback, *(route.transport for route in self.routes)):
            if name not in TRANSPORTS:
                raise ArgumentError(f"route over {name!r}: allowed is {', '.join(TRANSPORTS)}")

    def candidates(self, op: str, nbytes: int) -> list[str]:
        """The transports for a call, best first, the fallback last."""
        fitting = [r for r in self.routes if r.op == op and (r.max_bytes is None or nbytes <= r.max_bytes)]
        fitting.sort(key=lambda r: float("inf") if r.max_bytes is None else r.max_bytes)
        return [*(r.transport for r in fitting), self.fallback]

    def restricted(self, transports: Sequence[str]) -> RouteTable:
        """The same table without the routes over transports that are not connected. The fallback must be connected."""
        if self.fallback not in transports:
            raise ArgumentError(f"route table fallback={self.fallback!r}: allowed is {', '.join(transports)}")
        return RouteTable(self.fallback, tuple(r for r in self.routes if r.transport in transports))

    def as_json(self) -> dict[str, Any]:
        return {"fallback": self.fallback, "routes": [[r.op, r.max_bytes, r.transport] for r in self.routes]}

    def digest(self) -> str:
        """Equal on every rank, or the group does not start."""
        return hashlib.sha256(json.dumps(self.as_json()).encode()).hexdigest()[:16]
