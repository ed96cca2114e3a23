"""A stack of V4.1-shaped decoder layers for `bench prefill`: synthetic weights, real shapes, real collectives.

Each layer is an attention and a MoE sublayer around a residual of four streams (prefill_rows.py). What needs all rows:

* attention: wqkv_a (replicated), wq_b, wo_a and wo_b as the model cuts them over ranks; each block of 128 queries
  attends to 640 rows, as many as the model's sparse attention reads (512 chosen, a window of 128), without a mask;
* MoE: one dense SwiGLU as wide as the 6 routed experts and the shared one together: the flops of the model's grouped
  product, not its weight traffic.

Both end in a partial sum per rank. Stock all-reduces it and repeats the row-local work on every row; a `RowScope` says
otherwise (comm, fast, exact).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..comm import Communicator, RowScope
from ..comm.errors import ArgumentError
from .prefill_rows import STREAMS, TILE, Mixer, combine_norm, make_mixer, mix, post

__all__ = ["Counted", "Result", "Shape", "Stack", "rows_in"]

_QUERIES, _KEYS = 128, 640
_BLOCKS_AT_ONCE = 16


class Shape(NamedTuple):
    """Sizes of a layer. `experts`: routed experts of a token and the shared one."""

    hidden: int
    heads: int
    head_dim: int
    q_lora: int
    groups: int
    o_lora: int
    inter: int
    experts: int

    @classmethod
    def of(cls, hidden: int) -> Shape:
        """DeepSeek-V4.1-Flash at 5120; below that everything but counts is scaled down with it."""
        if hidden == 5120:
            return cls(5120, 64, 512, 1280, 8, 1024, 2304, 7)
        return cls(hidden, 16, max(16, hidden // 16), hidden // 4, 8, max(16, hidden // 8), hidden // 2, 7)

    def check(self, world: int) -> None:
        """Raises ArgumentError where a rank would not get whole heads and groups."""
        if self.heads % world or self.groups % world or self.inter % world:
            raise ArgumentError(f"{world} ranks: {self.groups} groups of heads do not divide; allowed is 1, 2, 4, 8")

    def flops(self, rows: int, world: int) -> float:
        """Of a layer's two sublayers on one rank."""
        wide = self.heads * self.head_dim // world
        attention = self.hidden * (self.q_lora + self.head_dim) + self.q_lora * wide + 2 * wide * _KEYS
        attention += wide * self.o_lora + self.groups * self.o_lora // world * self.hidden
        return 2.0 * rows * (attention + 3 * self.hidden * self.inter * self.experts // world)


class _Random:
    """Weights [..., fan out, fan in] (three dimensions: fan in before out), bf16, from a seed."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._device, self._gen = device, torch.Generator(device).manual_seed(seed)

    def __call__(self, *size: int) -> torch.Tensor:
        made = torch.randn(*size, generator=self._gen, device=self._device, dtype=torch.bfloat16)
        return made * (size[-2] if len(size) == 3 else size[-1]) ** -0.5


class _Attention:
    def __init__(self, shape: Shape, world: int, shared: _Random, own: _Random) -> None:
        self.shape, self.heads, self.groups = shape, shape.heads // world, shape.groups // world
        wide = self.heads * shape.head_dim
        self.wqkv_a = shared(shape.q_lora + shape.head_dim, shape.hidden)
        self.wq_b = own(wide, shape.q_lora)
        self.wo_a = own(self.groups, wide // self.groups, shape.o_lora)
        self.wo_b = own(shape.hidden, self.groups * shape.o_lora)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows, shape = x.shape[0], self.shape
        low = torch.nn.functional.linear(x, self.wqkv_a)
        q = torch.nn.functional.linear(low[:, : shape.q_lora].contiguous(), self.wq_b)
        kv = torch.nn.functional.pad(low[:, shape.q_lora :], (0, 0, _KEYS - _QUERIES, 0))
        keys = kv.unfold(0, _KEYS, _QUERIES)  # [blocks, head_dim, keys], a view
        blocks = rows // _QUERIES
        q = q.view(blocks, _QUERIES * self.heads, shape.head_dim)
        out = torch.empty_like(q)
        for at in range(0, blocks, _BLOCKS_AT_ONCE):
            some = slice(at, at + _BLOCKS_AT_ONCE)
            chosen = keys[some].contiguous()
            weights = torch.softmax(torch.bmm(q[some], chosen) * shape.head_dim**-0.5, -1)
            torch.bmm(weights, chosen.transpose(1, 2), out=out[some])
        grouped = out.view(rows, self.groups, -1).transpose(0, 1)
        low = torch.bmm(grouped, self.wo_a).transpose(0, 1).reshape(rows, -1)
        return torch.nn.functional.linear(low, self.wo_b)


class _Moe:
    def __init__(self, shape: Shape, world: int, shared: _Random, own: _Random) -> None:
        wide = shape.inter // world * shape.experts
        self.up, self.gate = own(wide, shape.hidden), own(wide, shape.hidden)
        self.down = own(shape.hidden, wide)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate = torch.nn.functional.silu(torch.nn.functional.linear(x, self.gate))
        return torch.nn.functional.linear(gate.mul_(torch.nn.functional.linear(x, self.up)), self.down)


class _Sublayer(NamedTuple):
    norm: torch.Tensor
    mixer: Mixer
    work: Callable[[torch.Tensor], torch.Tensor]


class Result(NamedTuple):
    """out: [T, H], the final normed rows, on every rank. residual: the rows this rank holds, [held, S, H]."""

    out: torch.Tensor
    residual: torch.Tensor


class Stack:
    """`layers` layers on this rank. Replicated weights are the same on every rank, cut ones differ."""

    def __init__(self, shape: Shape, layers: int, comm: Communicator) -> None:
        shape.check(comm.ranks.size)
        self.shape, self.comm, self.layers = shape, comm, layers
        self.sublayers: list[_Sublayer] = []
        device, rank = comm.ranks.device, comm.ranks.rank
        self.norm = torch.ones(shape.hidden, dtype=torch.bfloat16, device=device)
        self.wkv = _Random(7, device)(5 * shape.hidden, shape.hidden)  # Engram's, replicated; not part of a pass
        for kind in (_Attention, _Moe) * layers:
            seed = 1000 * len(self.sublayers)
            shared, own = _Random(seed, device), _Random(seed + 1 + rank, device)
            work = kind(shape, comm.ranks.size, shared, own)
            norm = 1.0 + shared(shape.hidden)
            self.sublayers.append(_Sublayer(norm, make_mixer(shape.hidden, seed, device), work))

    def over(self, comm: Communicator) -> Stack:
        """The same layers over another communicator of the same ranks."""
        other = copy.copy(self)
        other.comm = comm
        return other

    def start(self, rows: int, seed: int = 1) -> torch.Tensor:
        """A residual [rows, S, H], the same on every rank."""
        gen = torch.Generator(self.comm.ranks.device).manual_seed(seed)
        x = torch.randn(rows, 1, self.shape.hidden, generator=gen, device=self.comm.ranks.device, dtype=torch.bfloat16)
        return x.expand(rows, STREAMS, self.shape.hidden).contiguous()

    def run(self, residual: torch.Tensor, scope: RowScope | None, comm: Any = None, work: bool = True) -> Result:
        """One pass. scope None is stock. `comm`: who carries stock's sums. Without `work` the sublayers' products are
        left out (their partial sums are zeros): the row-local work and the collectives."""
        comm = comm or self.comm
        rows = residual.shape[0]
        zeros = None if work else torch.zeros(rows, self.shape.hidden, dtype=residual.dtype, device=residual.device)
        held = residual if scope is None else scope.take(residual)
        pre = torch.full((held.shape[0], STREAMS), 1.0 / STREAMS, device=held.device)
        for sublayer in self.sublayers:
            x = combine_norm(held, pre, sublayer.norm)
            pre, po, co = mix(held, sublayer.mixer)
            x = x if scope is None else scope.gather(x, label="prefill:gather")
            partial = sublayer.work(x) if zeros is None else zeros
            if scope is None:
                y = comm.all_reduce(partial, out=partial, label="prefill:sum")
            else:
                y = scope.scatter(partial, label="prefill:scatter")
            held = post(held, y, po, co)
        out = combine_norm(held, pre, self.norm)  # what the exit gathers: a quarter of the residual's bytes
        return Result(out if scope is None else scope.gather(out, label="prefill:out"), held)

    def engram(self, x: torch.Tensor) -> torch.Tensor:
        """Engram's projection, [rows, H] -> [rows, 5 H]: row-local, and the one large product that is."""
        return torch.nn.functional.linear(x, self.wkv)

    def row_work(self, held: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The row-local work of a pass alone, no products, no collectives. y: [held, H], what every sublayer gave."""
        pre = torch.full((held.shape[0], STREAMS), 1.0 / STREAMS, device=held.device)
        for sublayer in self.sublayers:
            combine_norm(held, pre, sublayer.norm)
            pre, po, co = mix(held, sublayer.mixer)
            held = post(held, y, po, co)
        return combine_norm(held, pre, self.norm)


class Counted:
    """A communicator that counts: calls, and the bytes that a rank sends in a ring (the least that each moves):
    2 (n-1)/n of an all-reduced tensor, (n-1)/n of a gathered or scattered one."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self.ranks = comm.ranks
        self.calls: dict[str, int] = {}
        self.sent = 0

    def all_reduce(self, x: torch.Tensor, *args: Any, **more: Any) -> torch.Tensor:
        self._count("all_reduce", 2 * x.nbytes)
        return self._comm.all_reduce(x, *args, **more)

    def all_gather(self, x: torch.Tensor, *args: Any, **more: Any) -> torch.Tensor:
        self._count("all_gather", x.nbytes * self.ranks.size)
        return self._comm.all_gather(x, *args, **more)

    def reduce_scatter(self, x: torch.Tensor, *args: Any, **more: Any) -> torch.Tensor:
        self._count("reduce_scatter", x.nbytes)
        return self._comm.reduce_scatter(x, *args, **more)

    def _count(self, op: str, nbytes: int) -> None:
        self.calls[op] = self.calls.get(op, 0) + 1
        self.sent += nbytes * (self.ranks.size - 1) // self.ranks.size


def rows_in(world: int) -> int:
    """Rows must be a multiple of this: whole tiles of row-local work on each rank, whole blocks of queries."""
    return math.lcm(TILE * world, _QUERIES)
