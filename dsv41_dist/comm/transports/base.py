"""What a transport is: one way to move bytes between the ranks of a group.

A transport is connected for all ranks or for none (`comm.establish`): `probe` and `allocate` are local, their
failures are carried to a vote and not raised on one rank; `attach` sees what every rank allocated. Afterwards the
`Communicator` calls it with arguments it has checked already: contiguous tensors on `ranks.device`, a supported
dtype, outputs of the right shape, and more than zero bytes. A routing decision is never made in here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

if TYPE_CHECKING:
    from ..layout import Split
    from ..ranks import Ranks
    from ..watch import Watch

__all__ = ["OPS", "REDUCE_OPS", "SUM_DTYPES", "Call", "Transport", "as_bytes"]

OPS = ("all_reduce", "all_gather", "all_gather_columns", "reduce_scatter", "broadcast", "barrier")
REDUCE_OPS = ("sum", "prod", "min", "max")
#: What every backend can reduce. Byte copies take any dtype.
SUM_DTYPES = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
)


@dataclass(frozen=True)
class Call:
    """A call declared before graph capture: everything a route may depend on, equal on every rank.

    Of a column gather the size in the dimension that is split is free: `split` says what each rank's is.
    """

    op: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    dim: int = 0
    reduce_op: str = "sum"
    split: Split | None = None


class Transport(ABC):
    """One instance per communicator and rank.

    Class attributes:
        name: how routes, logs and the command line call it.
        one_shot: sums are in rank order, accumulated in fp32 and rounded once: the bits of `reference.reduce`.
        needs_prepare: inside a graph capture only calls declared with `prepare` may take it.
    """

    name: ClassVar[str]
    one_shot: ClassVar[bool] = False
    needs_prepare: ClassVar[bool] = False

    def __init__(self, ranks: Ranks, watch: Watch) -> None:
        self.ranks = ranks
        self.watch = watch

    @classmethod
    def probe(cls, ranks: Ranks) -> str | None:
        """None when this rank could use the transport, otherwise why not and what to do. Local; never raises."""
        return None

    def allocate(self) -> bytes:
        """Take local resources; what is returned travels to every rank's `attach`. May raise: the error is voted on."""
        return b""

    def attach(self, blobs: Sequence[bytes]) -> None:
        """Open what the other ranks allocated (`blobs` by rank). May raise: the error is voted on."""

    def detach(self) -> None:
        """Let go of what `attach` opened, because some rank could not attach; `close` follows once all have. Never
        raises.
        """

    def prepare(self, calls: Sequence[Call]) -> None:
        """Compile and allocate for these calls, before any capture. Collective: all ranks pass equal calls."""

    def takes(self, call: Call, nbytes: int) -> bool:
        """Whether the transport can carry a call; only from facts every rank shares."""
        return True

    @abstractmethod
    def all_reduce(self, x: torch.Tensor, op: str, out: torch.Tensor) -> None:
        """out = the reduction of every rank's x; `out` may be `x` itself."""

    @abstractmethod
    def all_gather_rows(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """out, of world * x.numel() elements, receives every rank's x one after the other."""

    @abstractmethod
    def reduce_scatter(self, x: torch.Tensor, op: str, out: torch.Tensor) -> None:
        """out = this rank's 1/world of the rows (dim 0) of the reduction of every rank's x."""

    @abstractmethod
    def broadcast(self, x: torch.Tensor, src: int) -> None:
        """x of rank `src` replaces x everywhere, in place."""

    def all_gather(self, x: torch.Tensor, dim: int, out: torch.Tensor) -> None:
        """out = the ranks' x side by side along dim (non-negative). A transport that can write there directly
        overrides it.
        """
        if dim == 0:
            self.all_gather_rows(x, out)
            return
        world = self.ranks.size
        scratch = torch.empty((world, *x.shape), dtype=x.dtype, device=x.device)
        self.all_gather_rows(x, scratch)
        shape = (*x.shape[:dim], world, *x.shape[dim:])
        out.view(shape).copy_(scratch.movedim(0, dim))

    def all_gather_columns(self, x: torch.Tensor, split: Split, out: torch.Tensor) -> None:
        """out[..., start:start+size] = the x of each rank; shards differ in width, so they travel at the widest one."""
        widest, mine = split.widest, split.size(self.ranks.rank)
        rows = x.shape[:-1]
        send = x
        if mine != widest:
            send = torch.empty((*rows, widest), dtype=x.dtype, device=x.device)
            send[..., :mine].copy_(x)
        scratch = torch.empty((split.world, *rows, widest), dtype=x.dtype, device=x.device)
        self.all_gather_rows(send, scratch)
        for rank, (start, size) in enumerate(zip(split.starts, split.sizes, strict=True)):
            out[..., start : start + size].copy_(scratch[rank, ..., :size])

    def barrier(self) -> None:
        """Returns when every rank has entered. The default reduces one element."""
        flag = torch.zeros(1, dtype=torch.int32, device=self.ranks.device)
        self.all_reduce(flag, "sum", flag)
        if flag.is_cuda:
            self.watch.wait_device()

    def check(self) -> None:
        """Raise what has poisoned the transport, if anything has. Cheap; no device synchronisation."""

    def close(self) -> None:
        """Give resources back, in bounded time, before the process groups go. Never raises."""


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as uint8 [nbytes], sharing its memory: how any dtype travels, bit for bit."""
    return x.reshape(-1).view(torch.uint8)
