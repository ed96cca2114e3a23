"""MPI through mpi4py: for jobs started by mpirun, and an oracle that shares no code with torch.distributed.

Bytes travel as MPI_BYTE by non-blocking calls that are polled, so that a wait has a bound. Floating-point sums follow
`reference.reduce` (rank order, fp32, one rounding: bit-identical on every rank); 8-, 32- and 64-bit integers are
reduced by MPI itself. CPU tensors are passed as NumPy views of their memory; CUDA tensors only to a CUDA-aware MPI.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from .. import reference
from ..errors import ArgumentError
from ..ranks import Ranks
from ..watch import Watch
from .base import Transport, as_bytes

__all__ = ["MpiTransport", "cuda_aware"]

_MAX_BYTES = 2**31 - 1  # an MPI-3 count is an int
_INTEGERS = {torch.int8: "int8", torch.uint8: "uint8", torch.int32: "int32", torch.int64: "int64"}


class MpiTransport(Transport):
    """Collectives of an MPI communicator."""

    name = "mpi"
    one_shot = True

    def __init__(self, ranks: Ranks, watch: Watch) -> None:
        super().__init__(ranks, watch)
        from mpi4py import MPI

        self._comm = ranks.device_group
        self._byte = MPI.BYTE
        self._ops = {"sum": MPI.SUM, "prod": MPI.PROD, "min": MPI.MIN, "max": MPI.MAX}

    @classmethod
    def probe(cls, ranks: Ranks) -> str | None:
        if ranks.kind != "mpi":
            return "the ranks were not joined by MPI: start them with mpirun"
        if ranks.device.type == "cuda" and not cuda_aware():
            return "this MPI is not CUDA-aware (MPIX_Query_cuda_support says no): use --transport process_group"
        return None

    def all_reduce(self, x: torch.Tensor, op: str, out: torch.Tensor) -> None:
        if x.dtype in _INTEGERS:
            send = _buffer(x.clone() if out.data_ptr() == x.data_ptr() else x)
            self._finish(self._comm.Iallreduce(send, _buffer(out), self._ops[op]), (x, out))
            return
        shards = torch.empty((self.ranks.size, *x.shape), dtype=x.dtype, device=x.device)
        self.all_gather_rows(x, shards)
        out.copy_(reference.reduce(list(shards.unbind(0)), op))

    def all_gather_rows(self, x: torch.Tensor, out: torch.Tensor) -> None:
        send, receive = self._bytes(x), self._bytes(out, each=x)
        self._finish(self._comm.Iallgather(send, receive), (send, receive))

    def reduce_scatter(self, x: torch.Tensor, op: str, out: torch.Tensor) -> None:
        pieces = torch.empty((self.ranks.size, *out.shape), dtype=x.dtype, device=x.device)
        send, receive = self._bytes(x, each=out), self._bytes(pieces, each=out)
        self._finish(self._comm.Ialltoall(send, receive), (send, receive))
        out.copy_(reference.reduce(list(pieces.unbind(0)), op))

    def broadcast(self, x: torch.Tensor, src: int) -> None:
        data = self._bytes(x)
        self._finish(self._comm.Ibcast(data, root=src), data)

    def barrier(self) -> None:
        self._finish(self._comm.Ibarrier(), None)

    def _bytes(self, x: torch.Tensor, each: torch.Tensor | None = None) -> list[Any]:
        """An MPI buffer of the tensor's bytes; with `each`, one block of that size per rank."""
        count = (x if each is None else each).nbytes
        if count > _MAX_BYTES:
            raise ArgumentError(f"{count} bytes per rank: MPI carries at most {_MAX_BYTES} in one call")
        return [_buffer(as_bytes(x)), count, self._byte]

    def _finish(self, request: Any, buffers: Any) -> None:
        if self.ranks.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        self.watch.wait_until(request.Test, (request, buffers))


def cuda_aware() -> bool:
    """Whether the loaded MPI library says that it takes device pointers (Open MPI's and MPICH's extension)."""
    import mpi4py.MPI as MPI  # loads the library, whose symbols are global from here on

    try:
        library = ctypes.CDLL(MPI.__file__)
        return bool(library.MPIX_Query_cuda_support())
    except (AttributeError, OSError):
        return False


def _buffer(x: torch.Tensor) -> Any:
    """Something mpi4py reads as a buffer: NumPy for CPU memory, the tensor's own CUDA array interface otherwise."""
    return x if x.is_cuda else x.numpy()
