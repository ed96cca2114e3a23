"""The one-shot transport of a group without GPUs or RDMA: every process writes into memory that all others map.

In the place of `peer` (kernels over GPU peer memory). The same meaning as every one-shot transport: copies are exact,
sums are in rank order, in fp32, rounded once.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
from collections.abc import Sequence
from typing import Any

import torch

from ...comm import reference
from ...comm.errors import TransportUnavailable
from ...comm.ranks import Ranks
from ...comm.transports import Call, Transport
from ...comm.transports.base import as_bytes
from ...comm.watch import Watch

__all__ = ["LoopbackTransport"]

_CAPACITY = 1 << 20  # bytes of one rank in one call
_HEAD = 4096


class LoopbackTransport(Transport):
    """Two slots a rank, used in turn. The sequence number beside them says which call a rank has written.

    A rank writes call n + 2 over call n after it has seen everyone's call n + 1, and who has written that has read n.
    """

    name = "peer"
    one_shot = True

    def __init__(self, ranks: Ranks, watch: Watch) -> None:
        super().__init__(ranks, watch)
        self._maps: list[Any] = []
        self._sequences: list[Any] = []
        self._data: list[torch.Tensor] = []
        self._calls = 0
        self._file = -1

    @property
    def memory_bytes(self) -> int:
        """Bytes of this rank's slots."""
        return _HEAD + 2 * _CAPACITY

    @classmethod
    def probe(cls, ranks: Ranks) -> str | None:
        return None if ranks.device.type == "cpu" else f"the loopback stand-in is for CPU tensors, not {ranks.device}"

    def allocate(self) -> bytes:
        self._file = os.memfd_create("dsv41-loopback")
        os.ftruncate(self._file, self.memory_bytes)
        return json.dumps([os.getpid(), self._file]).encode()

    def attach(self, blobs: Sequence[bytes]) -> None:
        for rank, blob in enumerate(blobs):
            process, file = json.loads(blob)
            try:
                with open(f"/proc/{process}/fd/{file}", "r+b") as opened:
                    held = mmap.mmap(opened.fileno(), self.memory_bytes)
            except OSError as error:
                raise TransportUnavailable(self.name, f"memory of rank {rank} cannot be mapped: {error}") from error
            self._maps.append(held)
            self._sequences.append(ctypes.c_uint64.from_buffer(held))
            self._data.append(torch.frombuffer(held, dtype=torch.uint8, offset=_HEAD).view(2, _CAPACITY))

    def takes(self, call: Call, nbytes: int) -> bool:
        if call.op in ("all_reduce", "reduce_scatter"):
            sums = call.reduce_op == "sum" and call.dtype in (torch.float16, torch.bfloat16, torch.float32)
            return sums and nbytes <= _CAPACITY
        return nbytes <= _CAPACITY

    def all_reduce(self, x: torch.Tensor, op: str, out: torch.Tensor) -> None:
        shards = self._exchange(x)
        out.copy_(reference.all_reduce([shard.view(x.dtype).view(x.shape) for shard in shards]))

    def all_gather_rows(self, x: torch.Tensor, out: torch.Tensor) -> None:
        as_bytes(out).copy_(torch.cat(self._exchange(x)))

    def reduce_scatter(self, x: torch.Tensor, op: str, out: torch.Tensor) -> None:
        shards = self._exchange(x)
        everyone = [shard.view(x.dtype).view(x.shape) for shard in shards]
        out.copy_(reference.all_reduce(everyone).view(self.ranks.size, *out.shape)[self.ranks.rank])

    def broadcast(self, x: torch.Tensor, src: int) -> None:
        as_bytes(x).copy_(self._exchange(x)[src])

    def close(self) -> None:
        # The mappings go with the process: tensors may still look into them.
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's bytes of this call, as views that hold until the call after the next."""
        self._calls += 1
        call, slot = self._calls, self._calls % 2
        self._data[self.ranks.rank][slot, : x.nbytes].copy_(as_bytes(x))
        self._sequences[self.ranks.rank].value = call
        self.watch.wait_until(lambda: all(sequence.value >= call for sequence in self._sequences), x)
        return [data[slot, : x.nbytes] for data in self._data]
