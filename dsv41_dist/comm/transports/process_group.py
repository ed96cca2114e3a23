"""torch.distributed: NCCL for CUDA tensors, gloo for CPU tensors. The default, and what everything falls back to.

Sums are in the backend's own order and precision (guarantee: reordered sum). Byte copies are exact for any dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ..ranks import Ranks, backend_for
from ..watch import Watch
from .base import Transport, as_bytes

__all__ = ["ProcessGroupTransport"]

# torch 2.13 renamed these two and warns about the old names; torch 2.11 knows only the old ones.
_gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor")  # noqa: B009
_scatter: Any = getattr(dist, "reduce_scatter_single", None) or getattr(dist, "reduce_scatter_tensor")  # noqa: B009
_OPS = {"sum": dist.ReduceOp.SUM, "prod": dist.ReduceOp.PRODUCT, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}


class ProcessGroupTransport(Transport):
    """Collectives of `ranks.device_group`."""

    name = "process_group"

    def __init__(self, ranks: Ranks, watch: Watch) -> None:
        super().__init__(ranks, watch)
        self._group: Any = ranks.device_group
        self._cuda = ranks.device.type == "cuda"
        self._options: dict[str, Any] = {}
        for op, reduce_op in _OPS.items():
            self._options[op] = dist.AllreduceOptions()
            self._options[op].reduceOp = reduce_op

    @classmethod
    def probe(cls, ranks: Ranks) -> str | None:
        if ranks.kind != "torch":
            return "the ranks were joined by MPI, not by torch.distributed: use --transport mpi"
        backend = backend_for(ranks.device_group, ranks.device.type)
        if ranks.device.type == "cuda" and backend != "nccl":
            return f"CUDA tensors need an NCCL group, this one has {dist.get_backend_config(ranks.device_group)}"
        return None

    def all_reduce(self, x: torch.Tensor, op: str, out: torch.Tensor) -> None:
        if out.data_ptr() != x.data_ptr():
            out.copy_(x)
        self._finish(lambda: self._group.allreduce([out], self._options[op]), out)

    def all_gather_rows(self, x: torch.Tensor, out: torch.Tensor) -> None:
        send, receive = as_bytes(x), as_bytes(out)
        self._finish(lambda: _gather(receive, send, group=self._group, async_op=True), (send, receive))

    def reduce_scatter(self, x: torch.Tensor, op: str, out: torch.Tensor) -> None:
        self._finish(lambda: _scatter(out, x, op=_OPS[op], group=self._group, async_op=True), (x, out))

    def broadcast(self, x: torch.Tensor, src: int) -> None:
        data = as_bytes(x)
        self._finish(lambda: dist.broadcast(data, group=self._group, group_src=src, async_op=True), data)

    def _finish(self, start: Callable[[], Any], buffers: Any) -> None:
        try:
            work = start()
        except RuntimeError as error:
            # gloo says at the call, not at the wait, that a peer closed its connection.
            self.watch.report(f"the backend says: {str(error).splitlines()[0]}")
        if self._cuda:
            # Orders the stream only; the host's bounded wait is Communicator.synchronize, NCCL's own is its watchdog.
            work.wait()
        else:
            self.watch.wait(work, buffers)
