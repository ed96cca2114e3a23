"""One-shot collectives over GPU peer memory: what is launched, and where everything lies in memory.

The kernels are in peer*.cuh; the head of peer_core.cuh states the protocols, why two slots are enough, and how waits
end. Plain torch twins: `comm.reference`. A rank is an index and a list of arenas here; who they are is the caller's
business.

Bytes that cross the links into one GPU, world W, n bytes per rank: gather (W-1) n; one-shot sum (W-1) n; two-shot sum
2 (W-1) n / W; reduce-scatter (W-1) n / W; the packet protocol doubles them, the line protocol adds 1/15. At 478 GB/s a
direction (NV18) a gather of 64 MiB at W=2 takes 140 us or more.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from importlib.resources import files
from operator import or_
from typing import Protocol

import torch

from .peer_plan import Plan

__all__ = [
    "KINDS",
    "MAX_WORLD",
    "SOURCES",
    "SUM_NAMES",
    "Args",
    "Columns",
    "Device",
    "Group",
    "Layout",
    "barrier",
    "copy_columns",
    "source",
    "sum_parts",
]

MAX_WORLD = 8
#: Each kind has a sequence, slots and flags of its own, so that kinds do not order each other.
KINDS = ("copy", "sum", "barrier")
#: The parts of the source behind the device's own header, in order.
SOURCES = ("peer_core.cuh", "peer_small.cuh", "peer_bulk.cuh", "peer.cu")
SUM_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}

_CONTROL_BYTES = 1024  # 8 reports; per kind, from byte 128, a line with the sequence and the count of arrived blocks
_FLAG_BYTES = 32
_SHOTS = (1, 2)  # stage areas of the copy and of the sum kind
_U64, _U32 = ctypes.c_uint64, ctypes.c_uint32


def source() -> str:
    """The kernels' CUDA source behind a device header; compiled with -DWORLD=2 to 8."""
    return "".join((files("dsv41_dist.kernels") / name).read_text() for name in SOURCES)


class Args(ctypes.Structure):
    """struct Args of peer_core.cuh, field by field (a test compares the two)."""

    _fields_ = [
        ("peer", _U64 * 8),
        ("x", _U64),
        ("out", _U64),
        ("host", _U64),
        ("timeout_ns", _U64),
        ("pitch", _U64),
        ("start", _U64 * 8),
        ("area", _U64),
        ("source", _U64),
        ("stage", _U64 * 2),
        ("stage_slot", _U64 * 2),
        ("flags", _U64 * 2),
        ("flag_slot", _U64),
        ("width", _U32 * 8),
        ("rows", _U32),
        ("bytes", _U32),
        ("part", _U32),
        ("rank", _U32),
        ("kind", _U32),
        ("unit_x", _U32),
        ("unit_out", _U32),
        ("own", _U32),
        ("scatter", _U32),
        ("chunk", _U32),
        ("chunks", _U32),
        ("blocks", _U32 * 3),
    ]


class Device(Protocol):
    """What runs the kernels: CUDA (`peer_cuda`), or a CPU in tests. Addresses are integers."""

    @property
    def host_record(self) -> int:
        """Address, as the kernels write it, of 64 bytes that the host reads without synchronising."""
        ...

    def launch(self, name: str, grid: int, block: int, args: Args) -> None:
        """Put kernel `name` on the current stream."""
        ...


@dataclass(frozen=True)
class Layout:
    """Where the areas of an arena begin. The same on every rank by construction: it follows from the four numbers.

    Attributes:
        world: ranks, 2 to 8.
        packet_bytes, line_bytes: largest shard of the packet and line protocols.
        bulk_bytes: largest shard of the bulk protocol. A copy's stage slot holds one from every sender; a sum's the
            parts of one shard, or at world 2, where one shot is best at any size, a whole shard from both.
        chunks: flags there are for one sender, so the most chunks a shard may be cut into.
    """

    world: int
    packet_bytes: int = 128 << 10
    line_bytes: int = 8 << 20
    bulk_bytes: int = 64 << 20
    chunks: int = 2048

    def __post_init__(self) -> None:
        if not 2 <= self.world <= MAX_WORLD:
            raise ValueError(f"world={self.world}: allowed is 2 to {MAX_WORLD} ranks")
        for name in ("packet_bytes", "line_bytes", "bulk_bytes"):
            value = getattr(self, name)
            if not 64 <= value <= 1 << 30:
                raise ValueError(f"{name}={value}: allowed is 64 bytes to 1 GiB")

    @property
    def packet_source(self) -> int:
        """Bytes of one sender's packets in one slot."""
        return _round(self.packet_bytes * 2, 128)

    @property
    def line_source(self) -> int:
        """Bytes of one sender's lines in one slot; four to spare, because whole warps write and read."""
        return (math.ceil(self.line_bytes / 120) + 4) * 128

    @property
    def flag_slot(self) -> int:
        return self.world * self.chunks * _FLAG_BYTES

    def stage_slot(self, kind: int, shot: int) -> int:
        """Bytes of one slot; a little more than what it is for, because senders' regions are rounded up to 16 bytes."""
        shards = self.world if kind == 0 else 2 if self.world == 2 and shot == 0 else 1
        return shards * _round(self.bulk_bytes, 128) + 128 * self.world

    def _kind_bytes(self, kind: int) -> int:
        small = 2 * self.world * (self.packet_source + self.line_source)
        return small + 2 * sum(self.stage_slot(kind, shot) + self.flag_slot for shot in range(_SHOTS[kind]))

    def packets(self, kind: int) -> int:
        """Offset of a kind's packet slots. The barrier's are a page behind everything else."""
        if kind == 2:
            return _CONTROL_BYTES + self._kind_bytes(0) + self._kind_bytes(1)
        return _CONTROL_BYTES + (self._kind_bytes(0) if kind else 0)

    def lines(self, kind: int) -> int:
        return self.packets(kind) + 2 * self.world * self.packet_source

    def stage(self, kind: int, shot: int) -> int:
        return self.lines(kind) + 2 * self.world * self.line_source + (2 * self.stage_slot(kind, 0) if shot else 0)

    def flags(self, kind: int, shot: int) -> int:
        stages = 2 * sum(self.stage_slot(kind, earlier) for earlier in range(_SHOTS[kind]))
        return self.stage(kind, 0) + stages + shot * 2 * self.flag_slot

    @property
    def nbytes(self) -> int:
        """Bytes of one arena. All of it must be zero before any rank launches anything."""
        return _round(self.packets(2) + 2 * self.world * 128, 2 << 20)

    def control(self, kind: int) -> int:
        """Offset of a kind's 64-bit sequence: how many calls of that kind this rank has made."""
        return 128 + 128 * kind


@dataclass(frozen=True)
class Columns:
    """Shards as columns of a row-major output, in bytes: rank s has widths[s] at starts[s] of each of `rows` rows."""

    rows: int
    widths: tuple[int, ...]
    starts: tuple[int, ...]
    pitch: int

    @classmethod
    def equal(cls, shape: Sequence[int], dim: int, item: int, world: int) -> Columns:
        """Equal shards [..., d, ...] of `item`-byte elements, side by side along dim."""
        rows = math.prod(shape[:dim])
        width = math.prod(shape[dim:]) * item
        return cls(rows, (width,) * world, tuple(width * rank for rank in range(world)), width * world)

    @classmethod
    def only(cls, nbytes: int, src: int, world: int) -> Columns:
        """A broadcast: the shard of src is everything, the others are empty."""
        return cls(1, tuple(nbytes if rank == src else 0 for rank in range(world)), (0,) * world, nbytes)

    @cached_property
    def largest(self) -> int:
        """Bytes of the largest shard."""
        return self.rows * max(self.widths)

    @cached_property
    def apart(self) -> int:
        """Every distance in out that an access must divide, OR-ed together."""
        distances = [*self.starts, *self.widths, self.pitch] if self.rows > 1 else self.starts
        return reduce(or_, distances)


class Group:
    """One rank's handle: its index, all arenas as it addresses them, and the device that runs its kernels."""

    def __init__(self, rank: int, arenas: Sequence[int], layout: Layout, device: Device) -> None:
        self.rank, self.layout, self.device = rank, layout, device
        self.args = Args()
        self.columns: Columns | None = None  # whose widths and starts args holds
        self.args.rank = rank
        self.args.host = device.host_record
        for index, arena in enumerate(arenas):
            self.args.peer[index] = arena

    def launch(self, name: str, kind: int, plan: Plan, timeout_s: float) -> None:
        args, layout = self.args, self.layout
        args.kind = kind
        args.timeout_ns = int(timeout_s * 1e9)
        for role, blocks in enumerate(plan.roles):
            args.blocks[role] = blocks
        if plan.protocol == "bulk":
            args.chunk, args.chunks = plan.chunk, layout.chunks
            args.flag_slot = layout.flag_slot
            for shot in range(_SHOTS[kind]):
                args.stage[shot], args.stage_slot[shot] = layout.stage(kind, shot), layout.stage_slot(kind, shot)
                args.flags[shot] = layout.flags(kind, shot)
        elif plan.protocol == "line":
            args.area, args.source = layout.lines(kind), layout.line_source
        else:
            args.area = layout.packets(kind)
            args.source = layout.packet_source if kind != 2 else 128
        self.device.launch(name, plan.grid, plan.block, args)


def copy_columns(
    group: Group, x: torch.Tensor, out: torch.Tensor, columns: Columns, plan: Plan, timeout_s: float
) -> None:
    """Every rank's shard x goes to its columns of every rank's out. A byte copy, at any alignment.

    x: contiguous, rows * widths[rank] bytes. out: contiguous, rows * pitch bytes; may be x where x lies in place.
    """
    args = group.args
    args.x, args.out = x.data_ptr(), out.data_ptr()
    if group.columns is not columns:
        group.columns = columns
        args.rows, args.pitch = columns.rows, columns.pitch
        for rank, (width, start) in enumerate(zip(columns.widths, columns.starts, strict=True)):
            args.width[rank], args.start[rank] = width, start
    start = columns.starts[group.rank]
    args.own = columns.widths[group.rank] > 0 and (columns.rows > 1 or args.x != args.out + start)
    args.unit_x = _unit(args.x)
    args.unit_out = _unit(args.out | columns.apart)
    group.launch(f"copy_{plan.protocol}", 0, plan, timeout_s)


def sum_parts(
    group: Group, x: torch.Tensor, out: torch.Tensor, plan: Plan, timeout_s: float, *, scatter: bool = False
) -> None:
    """out = the sum of every rank's x in rank order, in fp32, rounded once to nearest even; fp16, bf16, fp32.

    All of it ([n] -> [n], out may be x), by one or two shots with the same bits; or, with `scatter`, this rank's
    1/world of it (out must not overlap x).
    """
    args, world = group.args, group.layout.world
    if plan.two_shot and plan.protocol == "line":
        # Two shots in lines: each rank's part is summed to its place in out, and gathered there.
        part = out.view(-1).chunk(world)[group.rank]
        sum_parts(group, x, part, replace(plan, two_shot=False), timeout_s, scatter=True)
        columns = Columns(1, (part.nbytes,) * world, tuple(part.nbytes * rank for rank in range(world)), x.nbytes)
        copy_columns(group, part, out, columns, replace(plan, two_shot=False), timeout_s)
        return
    args.x, args.out, args.bytes = x.data_ptr(), out.data_ptr(), x.nbytes
    if scatter:
        args.scatter, args.part = 1, x.nbytes // world
    elif plan.two_shot:
        args.scatter, args.part = 2, _round(math.ceil(x.nbytes / world), 16)
    else:
        args.scatter, args.part = 0, x.nbytes
    args.unit_x = _unit(args.x | (args.part if scatter else 0))
    args.unit_out = _unit(args.out)
    group.launch(f"sum_{plan.protocol}_{SUM_NAMES[x.dtype]}", 1, plan, timeout_s)


def barrier(group: Group, timeout_s: float) -> None:
    """The stream goes on when every rank has come here: a gather of empty shards."""
    args = group.args
    group.columns = None
    args.rows = args.own = args.x = args.out = args.pitch = 0
    for rank in range(MAX_WORLD):
        args.width[rank] = args.start[rank] = 0
    group.launch("copy_packet", 2, Plan("packet", 1, 32), timeout_s)


def _unit(bits: int) -> int:
    """The widest access (1 to 16 bytes) that divides every number that was OR-ed into `bits`."""
    return min(bits & -bits, 16) if bits else 16


def _round(n: int, to: int) -> int:
    return (n + to - 1) // to * to
