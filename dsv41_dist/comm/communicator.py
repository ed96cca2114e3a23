"""`Communicator`: the one object a consumer holds. It checks a call, routes it, and counts it.

The meaning of every operation is `comm.reference`. Every call takes `label=`, a short constant that says who is
calling, so that a hang or a mismatch names the caller.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .agreement import Agreement
from .control import Control, Identity
from .errors import ArgumentError, LayoutError
from .layout import Split
from .ranks import Ranks
from .routing import RouteTable
from .settings import CommSettings
from .transports import REDUCE_OPS, SUM_DTYPES, Call, Transport
from .watch import Watch

__all__ = ["Communicator"]


class Communicator:
    """Collectives over the ranks of one group. Make one with `Communicator.create`, on every rank, in the same order.

    Attributes:
        ranks: who is in the group.
        transports: what is connected, by name.
        table: the frozen route table; routes over transports that did not connect are gone from it.
        agreement: `agree`, `agree_min`, `same_everywhere`, for decisions.
    """

    def __init__(
        self,
        ranks: Ranks,
        transports: Mapping[str, Transport],
        table: RouteTable,
        watch: Watch,
        control: Control,
        agreement: Agreement,
    ) -> None:
        self.ranks = ranks
        self.transports = dict(transports)
        self.table = table.restricted(list(transports))
        self.agreement = agreement
        self._watch = watch
        self._control = control
        self._routes: dict[Any, Transport] = {}
        self._declared: set[Any] = set()
        self._guarded = any(t.needs_prepare for t in self.transports.values())

    @staticmethod
    def create(
        ranks: Ranks,
        transports: Sequence[str] = (),
        table: RouteTable | None = None,
        settings: CommSettings | None = None,
    ) -> Communicator:
        """Connect and agree; collective over the group. In checked mode or with a decision log, an observed
        communicator.

        Args:
            transports: names beyond the base one (process_group, or mpi under MPI), best first: without a table they
                carry what they can at any size.
            table: routes; default is as just said.
            settings: bounds and modes; default from the environment.
        Raises DisagreementError on every rank when settings, transports or table differ between ranks.
        """
        from .create import create

        return create(ranks, transports, table, settings or CommSettings.from_env())

    def routed(self, table: RouteTable, *, label: str) -> Communicator:
        """This communicator with other routes: the same ranks, transports, call numbers and end; closing either closes
        both. Collective. Raises on every rank: DisagreementError when the tables differ, ArgumentError when the
        table's fallback is not connected."""
        self.agreement.same_everywhere(table.digest(), label=f"{label}:table")
        other = copy.copy(self)
        other.table, other._routes, other._declared = table.restricted(list(self.transports)), {}, set()
        return other

    # Operations. Each: enter (position, closed?), nothing to do?, route (checked once per kind of call), move.

    def all_reduce(
        self, x: torch.Tensor, op: str = "sum", *, out: torch.Tensor | None = None, label: str
    ) -> torch.Tensor:
        """The reduction (sum, prod, min, max) of every rank's x [any shape], on every rank.

        fp16, bf16, fp32, fp64, int8, uint8, int32, int64. `out=x` works in place; without `out` x is left alone.
        One-shot routes: rank order, fp32, rounded once, the same bits on every rank; others: reordered sum.
        """
        self._watch.enter(label)
        if out is None:
            out = torch.empty_like(x, memory_format=torch.contiguous_format)
        nbytes = x.nbytes
        route = self._routes.get(("all_reduce", op, x.dtype, nbytes, x.device, None)) if not self._guarded else None
        if route is None:
            route = self._route("all_reduce", x, nbytes, reduce_op=op)
        if out.shape != x.shape or out.dtype != x.dtype:
            raise _bad_out("all_reduce", out, tuple(x.shape), x.dtype)
        if nbytes == 0:
            return out
        if not x.is_contiguous():
            x = x.contiguous()
        if out.is_contiguous():
            route.all_reduce(x, op, out)
        else:
            dense = torch.empty_like(x)
            route.all_reduce(x, op, dense)
            out.copy_(dense)
        return out

    def all_gather(self, x: torch.Tensor, dim: int = 0, *, out: torch.Tensor | None = None, label: str) -> torch.Tensor:
        """Equal shards side by side along dim, rank 0 first. Any dtype; a byte copy (bit-identical).

        [.., s, ..] per rank -> [.., s * world, ..]; shapes must be the same on every rank.
        """
        self._watch.enter(label)
        if x.dim() == 0 or not -x.dim() <= dim < x.dim():
            raise ArgumentError(
                f"all_gather dim={dim}: allowed is -{x.dim()} to {x.dim() - 1} for {x.dim()} dimensions"
            )
        dim %= x.dim()
        shape = (*x.shape[:dim], x.shape[dim] * self.ranks.size, *x.shape[dim + 1 :])
        route = self._route("all_gather", x, x.nbytes, dim=dim)
        return self._gathered("all_gather", x, shape, out, lambda send, to: route.all_gather(send, dim, to))

    def all_gather_columns(
        self, x: torch.Tensor, split: Split, *, out: torch.Tensor | None = None, label: str
    ) -> torch.Tensor:
        """Shards of different width at their final columns: [..., split.sizes[rank]] per rank -> [..., split.n].

        Any dtype; bytes equal to pad + gather + cat (bit-identical). `split` must be the same on every rank.
        """
        self._watch.enter(label)
        self._check_split("all_gather_columns", x, split, -1)
        sent = self._widest(x, split)
        route = self._route("all_gather_columns", x, sent, dim=x.dim() - 1, split=split)
        shape = (*x.shape[:-1], split.n)
        return self._gathered(
            "all_gather_columns", x, shape, out, lambda send, to: route.all_gather_columns(send, split, to)
        )

    def all_gather_rows(
        self, x: torch.Tensor, split: Split, *, out: torch.Tensor | None = None, label: str
    ) -> torch.Tensor:
        """Row shards of different height, rank 0 first: [split.sizes[rank], ...] per rank -> [split.n, ...]. A byte
        copy.
        """
        self._watch.enter(label)
        self._check_split("all_gather_rows", x, split, 0)
        width = x[0].numel() if x.shape[0] else int(torch.Size(x.shape[1:]).numel())
        shape = (split.n, *x.shape[1:])
        # Rows of bytes are columns of one long row, which is what the column gather writes in place.
        scale = Split(split.n * width, tuple(size * width for size in split.sizes))
        route = self._route("all_gather_columns", x, split.widest * width * x.element_size(), dim=0, split=scale)
        return self._gathered(
            "all_gather_rows",
            x,
            shape,
            out,
            lambda send, to: route.all_gather_columns(send.reshape(-1), scale, to.view(-1)),
        )

    def reduce_scatter(
        self,
        x: torch.Tensor,
        op: str = "sum",
        *,
        dim: int = 0,
        exact: bool = False,
        out: torch.Tensor | None = None,
        label: str,
    ) -> torch.Tensor:
        """This rank's rows of the reduction: [rows, ...] per rank -> [rows / world, ...]. Rows must divide evenly.

        `exact=True` all-reduces and keeps the own rows: the same bits as `all_reduce`, at its cost.
        """
        self._watch.enter(label)
        if dim != 0 or x.dim() == 0:
            raise ArgumentError(f"reduce_scatter dim={dim} of {x.dim()} dimensions: allowed is 0 (rows)")
        world = self.ranks.size
        if x.shape[0] % world:
            raise LayoutError(f"reduce_scatter: {x.shape[0]} rows do not divide over {world} ranks")
        rows = x.shape[0] // world
        shape = (rows, *x.shape[1:])
        if out is None:
            out = torch.empty(shape, dtype=x.dtype, device=x.device)
        elif tuple(out.shape) != shape or out.dtype != x.dtype:
            raise _bad_out("reduce_scatter", out, shape, x.dtype)
        route = self._route("all_reduce" if exact else "reduce_scatter", x, x.nbytes, reduce_op=op)
        if x.nbytes == 0:
            return out
        x = x.contiguous()
        if exact:
            whole = torch.empty_like(x)
            route.all_reduce(x, op, whole)
            out.copy_(whole[self.ranks.rank * rows : (self.ranks.rank + 1) * rows])
        elif out.is_contiguous():
            route.reduce_scatter(x, op, out)
        else:
            dense = torch.empty(shape, dtype=x.dtype, device=x.device)
            route.reduce_scatter(x, op, dense)
            out.copy_(dense)
        return out

    def broadcast(self, x: torch.Tensor, src: int = 0, *, label: str) -> torch.Tensor:
        """x of rank `src` replaces x on every rank, in place. Any dtype; a byte copy."""
        self._watch.enter(label)
        if not 0 <= src < self.ranks.size:
            raise ArgumentError(f"broadcast src={src}: allowed is 0 to {self.ranks.size - 1}")
        route = self._route("broadcast", x, x.nbytes)
        if x.nbytes == 0:
            return x
        if x.is_contiguous():
            route.broadcast(x, src)
        else:
            dense = x.contiguous()
            route.broadcast(dense, src)
            x.copy_(dense)
        return x

    def barrier(self, *, label: str) -> None:
        """Returns when every rank has entered. On CUDA the host waits, with the bound."""
        self._watch.enter(label)
        self.transports[self.table.fallback].barrier()

    def synchronize(self, *, label: str) -> None:
        """The host waits, with the bound, until this device has run every call so far; then `check`."""
        self._watch.enter(label)
        self._watch.wait_device()
        self.check()

    def check(self) -> None:
        """Raise what has closed this communicator or poisoned one of its transports. No device synchronisation."""
        self._watch.raise_if_closed()
        for transport in self.transports.values():
            transport.check()

    def check_call(self, op: str, label: str) -> None:
        """Compare (op, label, sequence number) over all ranks, as checked mode does before every call.

        Raises MismatchError on every rank when they differ; the group stays usable.
        """
        self._watch.enter(label)
        self._control.vote(Identity(op, label))

    @property
    def closed(self) -> bool:
        """Whether a failure has closed this communicator, here or on another rank."""
        return self._watch.closed

    def prepare(self, calls: Sequence[Call], *, label: str) -> None:
        """Declare calls before graph capture, the same on every rank: compile and allocate now, because nothing is
        allocated, compiled or voted during capture. An undeclared call inside a capture takes the fallback.

        A column gather is known by its split and the other dimensions, on every rank alike: the size of `shape` in the
        dimension that is split is free. Raises ArgumentError for one without a split over this group.
        """
        for call in calls:
            if call.op == "all_gather_columns" and (call.split is None or call.split.world != self.ranks.size):
                over = "no split" if call.split is None else f"a split over {call.split.world} ranks"
                raise ArgumentError(f"prepare {call.op} with {over}: allowed is one over {self.ranks.size} ranks")
        self.agreement.same_everywhere([repr(call) for call in calls] or ["none"], label=label)
        for transport in self.transports.values():
            if transport.needs_prepare:
                transport.prepare([c for c in calls if transport.takes(c, 0)])
        self._declared.update(_declared_key(call) for call in calls)
        self.agreement.agree(True, label=f"{label}:done")

    def close(self) -> None:
        """Give the transports' resources back and stop the side channel. Local and bounded; before the process groups
        go.
        """
        for transport in self.transports.values():
            transport.close()
        self._watch.close()

    def route_name(self, op: str, x: torch.Tensor, **facts: Any) -> str:
        """The transport that a call would take (for reports)."""
        return self._route(op, x, x.nbytes, **facts).name

    def _route(
        self,
        op: str,
        x: torch.Tensor,
        nbytes: int,
        dim: int = 0,
        reduce_op: str | None = None,
        split: Split | None = None,
    ) -> Transport:
        undeclared = False
        if self._guarded and self._capturing(x):
            call = Call(op, tuple(x.shape), x.dtype, dim, reduce_op or "sum", split)
            undeclared = _declared_key(call) not in self._declared
        key: Any = (op, dim if reduce_op is None else reduce_op, x.dtype, nbytes, x.device, split)
        if self._guarded:
            key = (*key, undeclared)
        route = self._routes.get(key)
        if route is not None:
            return route
        if reduce_op is not None:
            if reduce_op not in REDUCE_OPS:
                raise ArgumentError(f"{op} op={reduce_op!r}: allowed is {', '.join(REDUCE_OPS)}")
            if x.dtype not in SUM_DTYPES:
                names = ", ".join(str(d).removeprefix("torch.") for d in SUM_DTYPES)
                raise ArgumentError(f"{op} dtype={str(x.dtype).removeprefix('torch.')}: allowed is {names}")
        if x.device != self.ranks.device and (x.device.type != self.ranks.device.type or x.is_cuda):
            raise ArgumentError(f"{op}: a tensor on {x.device}, the group's data is on {self.ranks.device}")
        call = Call(op, tuple(x.shape), x.dtype, dim, reduce_op or "sum", split)
        for name in self.table.candidates(op, nbytes):
            route = self.transports[name]
            last = name == self.table.fallback
            if last or (route.takes(call, nbytes) and not (undeclared and route.needs_prepare)):
                break
        assert route is not None
        self._routes[key] = route
        return route

    @staticmethod
    def _capturing(x: torch.Tensor) -> bool:
        return x.is_cuda and torch.cuda.is_current_stream_capturing()

    def _gathered(
        self, op: str, x: torch.Tensor, shape: tuple[int, ...], out: torch.Tensor | None, move: Any
    ) -> torch.Tensor:
        if out is None:
            out = torch.empty(shape, dtype=x.dtype, device=x.device)
        elif tuple(out.shape) != shape or out.dtype != x.dtype:
            raise _bad_out(op, out, shape, x.dtype)
        if out.nbytes == 0:
            return out
        send = _plain(x).contiguous()
        if out.is_contiguous():
            move(send, out)
        else:
            dense = torch.empty(shape, dtype=x.dtype, device=x.device)
            move(send, dense)
            out.copy_(dense)
        return out

    def _check_split(self, op: str, x: torch.Tensor, split: Split, dim: int) -> None:
        if split.world != self.ranks.size:
            raise ArgumentError(f"{op}: a split over {split.world} ranks in a group of {self.ranks.size}")
        mine = split.size(self.ranks.rank)
        if x.dim() == 0 or x.shape[dim] != mine:
            raise ArgumentError(
                f"{op} on rank {self.ranks.rank}: shape {tuple(x.shape)} has {x.shape[dim] if x.dim() else 'no'} "
                f"elements in dimension {dim}, the split gives this rank {mine} of {split.sizes}"
            )

    @staticmethod
    def _widest(x: torch.Tensor, split: Split) -> int:
        return int(torch.Size(x.shape[:-1]).numel()) * split.widest * x.element_size()


def _plain(x: torch.Tensor) -> torch.Tensor:
    """Lazy conjugation and negation resolved: what travels is the memory."""
    if x.is_complex():
        x = x.resolve_conj()
    return x.resolve_neg()


def _declared_key(call: Call) -> Any:
    """What makes two calls one declared call: never a rank's own shard of an uneven split."""
    shape, dim = call.shape, call.dim % max(1, len(call.shape))
    if call.op == "all_gather_columns" and call.split is not None:
        return call.op, shape[:dim] + shape[dim + 1 :], call.dtype, dim, call.split.sizes
    return call.op, shape, call.dtype, call.reduce_op if call.op in ("all_reduce", "reduce_scatter") else dim


def _bad_out(op: str, out: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> ArgumentError:
    return ArgumentError(f"{op} out: {tuple(out.shape)} {out.dtype}, needed is {shape} {dtype}")
