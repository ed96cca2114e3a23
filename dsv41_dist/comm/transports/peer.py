"""One-shot collectives over GPU peer memory, between the GPUs of one host (kernels/peer_core.cuh).

Sums are in rank order, in fp32, rounded once: the bits of `reference.reduce`; copies are exact for any dtype, size and
alignment. Everything is allocated and compiled while connecting, so any call may be captured into a CUDA graph.

Rules for streams: eager calls may change streams (the new one waits for the old); within a capture all calls are on one
stream; a replay and other calls of the same communicator are ordered by the caller, as any two users of one buffer.
A captured call keeps the bound (`DSV41_COMM_TIMEOUT_S`) that held when it was captured.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, NoReturn

import torch

from ...kernels import peer as kernels
from ...kernels import peer_cuda
from ...kernels.peer_plan import Plan, choose, fits
from ..errors import SettingsError, TransportError, TransportUnavailable
from ..layout import Split
from ..ranks import Ranks, host_identity
from ..watch import Watch
from .base import Call, Transport

__all__ = ["PeerSettings", "PeerTransport"]

_CLOSE_WAIT_S = 2.0
_CLOSED_WORDS = 512  # offset in the control page: one 64-bit word per rank that needs this arena no more
_SUMS = ("all_reduce", "reduce_scatter")
#: what must be equal on every rank, and what to do where it is not
_EQUAL = {
    "host": "peer serves the ranks of one host",
    "DSV41_PEER_MAX_MIB": "set it alike on every rank",
    "layout": "install the same dsv41-dist on every rank",
    "source": "install the same dsv41-dist on every rank",
}


@dataclass(frozen=True)
class PeerSettings:
    """max_mib: largest call, in MiB of what one rank sends.

    Each GPU gives 2 world + 4 times as much (10 times at world 2), and 35 MiB times world for smaller calls: 332 MiB at
    world 4 and the default.
    """

    max_mib: int = 16

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> PeerSettings:
        """Read DSV41_PEER_MAX_MIB (1 to 512). Raises SettingsError, naming the variable, the value, what is allowed."""
        text = (os.environ if env is None else env).get("DSV41_PEER_MAX_MIB", "").strip()
        if not text:
            return cls()
        if not text.isdecimal() or not 1 <= int(text) <= 512:
            raise SettingsError(f"DSV41_PEER_MAX_MIB={text!r}: allowed is a whole number of MiB from 1 to 512")
        return cls(int(text))


class PeerTransport(Transport):
    """The collectives of kernels/peer.py for the ranks of one host. Tests replace `missing` and `make_device`."""

    name = "peer"
    one_shot = True
    missing: ClassVar[Callable[[torch.device], str | None]] = staticmethod(peer_cuda.missing)
    make_device: ClassVar[Callable[[torch.device, int], Any]] = staticmethod(peer_cuda.CudaDevice)

    def __init__(self, ranks: Ranks, watch: Watch) -> None:
        super().__init__(ranks, watch)
        self.layout = kernels.Layout(ranks.size, bulk_bytes=PeerSettings.from_env().max_mib << 20)
        self.lines = False
        self._device: Any = None
        self._arena = 0
        self._opened: dict[int, int] = {}  # rank -> its arena, as addressed here
        self._group: kernels.Group | None = None
        # Both grow by one entry a shape. A serving process has few shapes; a cleared cache would only cost time.
        self._columns: dict[Any, kernels.Columns] = {}
        self._plans: dict[tuple[str, int], Plan] = {}

    @classmethod
    def probe(cls, ranks: Ranks) -> str | None:
        if not 2 <= ranks.size <= kernels.MAX_WORLD:
            return f"it serves 2 to {kernels.MAX_WORLD} ranks, this group has {ranks.size}"
        return cls.missing(ranks.device)

    def allocate(self) -> bytes:
        self._device = type(self).make_device(self.ranks.device, self.ranks.size)
        self._arena = self._device.allocate(self.layout.nbytes)
        facts = {
            "host": [host_identity().host, host_identity().table],
            "DSV41_PEER_MAX_MIB": self.layout.bulk_bytes >> 20,
            "layout": asdict(self.layout),
            "source": _source_digest(),
            "lines": self._device.whole_lines(),
            "gpu": self._device.identity(),
            "visible": self._device.visible(),
            "export": self._device.export().hex(),
        }
        return json.dumps(facts).encode()

    def attach(self, blobs: Sequence[bytes]) -> None:
        everyone = [json.loads(blob) for blob in blobs]
        mine = everyone[self.ranks.rank]
        for rank, facts in enumerate(everyone):
            for what, advice in _EQUAL.items():
                if facts[what] != mine[what]:
                    raise TransportUnavailable(
                        "peer",
                        f"{what} differs: rank {rank} has {facts[what]}, rank {self.ranks.rank} {mine[what]}; {advice}",
                    )
        arenas: list[int] = []
        for rank, facts in enumerate(everyone):
            if rank == self.ranks.rank:
                arenas.append(self._arena)
            else:
                self._opened[rank] = self._device.open(bytes.fromhex(facts["export"]))
                arenas.append(self._opened[rank])
        one_gpu = len({facts["gpu"] for facts in everyone}) == 1
        # A process knows the links between the GPUs that it sees: only where all see all are all links known.
        known = all(facts["gpu"] in other["visible"] for facts in everyone for other in everyone)
        self.lines = one_gpu or (known and all(facts["lines"] for facts in everyone))
        self._group = kernels.Group(self.ranks.rank, arenas, self.layout, self._device)

    def detach(self) -> None:
        self._opened.clear()
        self._device.unmap()

    def takes(self, call: Call, nbytes: int) -> bool:
        if call.op in _SUMS and (call.reduce_op != "sum" or call.dtype not in kernels.SUM_NAMES):
            return False
        nbytes = nbytes or _route_bytes(call)
        return fits(
            self.plan(call.op, nbytes),
            call.op,
            self.ranks.size,
            nbytes,
            self.layout.packet_bytes,
            self.layout.line_bytes,
            self.layout.bulk_bytes,
        )

    def plan(self, op: str, nbytes: int) -> Plan:
        """How a call of this size is launched; the same on every rank."""
        plan = self._plans.get((op, nbytes))
        if plan is None:
            threads = self._device.threads
            plan = choose(op, self.ranks.size, nbytes, lines=self.lines, chunks=self.layout.chunks, threads=threads)
            self._plans[op, nbytes] = plan
        return plan

    def all_reduce(self, x: torch.Tensor, op: str, out: torch.Tensor) -> None:
        kernels.sum_parts(self._ready(), x, out, self.plan("all_reduce", x.nbytes), self.watch.bound_s)

    def reduce_scatter(self, x: torch.Tensor, op: str, out: torch.Tensor) -> None:
        plan = self.plan("reduce_scatter", x.nbytes)
        kernels.sum_parts(self._ready(), x, out, plan, self.watch.bound_s, scatter=True)

    def all_gather(self, x: torch.Tensor, dim: int, out: torch.Tensor) -> None:
        key = (x.shape, dim, x.element_size())
        columns = self._columns.get(key)
        if columns is None:
            columns = self._columns[key] = kernels.Columns.equal(*key, self.ranks.size)
        self._copy("all_gather", x, out, columns)

    def all_gather_rows(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self.all_gather(x.reshape(-1), 0, out)

    def all_gather_columns(self, x: torch.Tensor, split: Split, out: torch.Tensor) -> None:
        item, rows = x.element_size(), math.prod(x.shape[:-1])
        key = (split.sizes, rows, item)
        columns = self._columns.get(key)
        if columns is None:
            widths = tuple(size * item for size in split.sizes)
            columns = kernels.Columns(rows, widths, tuple(start * item for start in split.starts), split.n * item)
            self._columns[key] = columns
        self._copy("all_gather_columns", x, out, columns)

    def broadcast(self, x: torch.Tensor, src: int) -> None:
        self._copy("broadcast", x, x, kernels.Columns.only(x.nbytes, src, self.ranks.size))

    def barrier(self) -> None:
        kernels.barrier(self._ready(), self.watch.bound_s)
        self.watch.wait_device()
        self.check()

    def check(self) -> None:
        if self._device is not None and self._device.poisoned():
            self._fail()

    def close(self) -> None:
        device, self._device = self._device, None
        if device is None:
            return
        try:
            device.close(free=self._all_done(device))
        except Exception:
            # The context may be gone, or another rank's memory with its process: the process's end frees the rest.
            return
        finally:
            self._group = None

    def _ready(self) -> kernels.Group:
        self.check()
        if self._group is None:
            raise TransportError("peer: not connected, or closed")
        return self._group

    def _copy(self, op: str, x: torch.Tensor, out: torch.Tensor, columns: kernels.Columns) -> None:
        kernels.copy_columns(self._ready(), x, out, columns, self.plan(op, columns.largest), self.watch.bound_s)

    def _fail(self) -> NoReturn:
        reports, kind, sequence = self._device.record()
        absent = sorted({rank for rank in range(self.ranks.size) for word in reports if word >> rank & 1})
        by = ", ".join(str(rank) for rank, word in enumerate(reports) if word)
        named = ", ".join(map(str, absent))
        reason = (
            f"peer: rank {named} did not arrive at {kernels.KINDS[kind]} call {sequence} on the device within the "
            f"bound, as reported by rank {by}"
        )
        # Every host may have made the call (a graph replay does not show there): the device saw who was missing.
        self.watch.report(reason, absent)

    def _all_done(self, device: Any) -> bool:
        """Tell every rank that its arena is not needed here any more, and wait a little for the same from them:
        a peer may still be reading this arena in a call that has ended here."""
        device.synchronize()
        for arena in self._opened.values():
            device.write_word(arena + _CLOSED_WORDS + 8 * self.ranks.rank, 1)
        deadline = time.monotonic() + _CLOSE_WAIT_S
        left = set(self._opened)
        while left and time.monotonic() < deadline:
            left -= {rank for rank in left if device.read_word(self._arena + _CLOSED_WORDS + 8 * rank)}
            time.sleep(0.001)
        return not left


def _route_bytes(call: Call) -> int:
    """The byte count of a declared call, as `Route` defines it."""
    if call.op == "all_gather_columns" and call.split is not None:
        return math.prod(call.shape[:-1]) * call.split.widest * call.dtype.itemsize
    return math.prod(call.shape) * call.dtype.itemsize


def _source_digest() -> str:
    return hashlib.sha256(kernels.source().encode()).hexdigest()[:16]
