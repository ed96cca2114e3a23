"""A stand-in for b12x.comm.roce on CPU tensors between real processes: the same names, signatures and errors, over
files in /dev/shm. test_b12x_surface.py compares it with the source of the published wheels, so it cannot drift alone.

The protocol is RoCEnante's: two slots, a flag per source and slot that holds the sequence number, a wait that ends in a
permanent poison. What is not here: the NIC, the proxy (test_c_proxy.py runs the real one), the GPU.
"""

from __future__ import annotations

import os
import time
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from dsv41_dist.comm.errors import TransportUnavailable
from dsv41_dist.comm.transports._roce_runtime import Library
from dsv41_dist.comm.transports.roce import RoceTransport

from ..stand_in_ranks import mapped
from .fake_host import host

SUPPORTED_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
DEFAULT_MAX_SIZE = 2 * 1024 * 1024
DEFAULT_MAX_GATHER_BYTES = 16 * 1024 * 1024
DEFAULT_THREADS = 512
DEFAULT_BLOCKS = 8
PACK_BYTES = 16
_HEAD = 4096


class Faults:
    """What a test wants to go wrong on this rank."""

    at: ClassVar[str] = ""  # "find", "build", "memory", "construct", "proxy", "connect", "compile", "wrong"
    skip: ClassVar[int] = 0  # collectives to leave out, as a rank does that does not replay its graph
    broken: ClassVar[str] = ""  # what the proxy reports
    hang_in_close: ClassVar[bool] = False
    wait_s: ClassVar[float] = 1.0

    @classmethod
    def hit(cls, at: str) -> None:
        if cls.at == at:
            raise RuntimeError(f"the test breaks {at!r} here")


def _exchange(local: object, group: ProcessGroup) -> list[object]:
    gathered: list[object] = [None] * dist.get_world_size(group=group)
    dist.all_gather_object(gathered, local, group=group)
    return gathered


class RoceOneshotAllReduce:
    """As in the wheel; CPU tensors count as on the device."""

    def __init__(
        self,
        *,
        exchange_group: ProcessGroup,
        device: Any,
        max_size: int = DEFAULT_MAX_SIZE,
        max_gather_bytes: int = DEFAULT_MAX_GATHER_BYTES,
        hca_names: Any = None,
        gid_index: Any = None,
        threads: int = DEFAULT_THREADS,
        blocks: int = DEFAULT_BLOCKS,
    ) -> None:
        Faults.hit("construct")  # before the first exchange: the others wait there
        self.device = torch.device(device)
        self.rank = dist.get_rank(group=exchange_group)
        self.world_size = dist.get_world_size(group=exchange_group)
        self.max_size, self.max_gather_bytes = max_size, max_gather_bytes
        self.hca_names, self.gid_index = tuple(hca_names), gid_index
        self.calls: list[tuple[str, int]] = []
        self._scratch = 0  # sized from max_gather_bytes when it is first allocated, never again
        self._closed, self._seq, self._error = False, 0, ""
        self._slot = -(-max(max_size, max_gather_bytes) // 4096) * 4096
        error = "the test breaks 'proxy' here" if Faults.at == "proxy" else None
        self._path = f"/dev/shm/dsv41-roce-{os.getpid()}-{id(self):x}"
        with open(self._path, "wb") as file:
            file.truncate(_HEAD + 2 * self._slot)
        try:
            config = {"max_size": max_size, "max_gather_bytes": max_gather_bytes, "hca_count": len(self.hca_names)}
            statuses: list[Any] = _exchange((error, self._path, config), exchange_group)
            failures = [f"rank {i}: {s[0]}" for i, s in enumerate(statuses) if s[0] is not None]
            failures += [
                f"rank {i} configuration differs from rank 0"
                for i, s in enumerate(statuses)
                if s[2] != statuses[0][2] and not failures
            ]
            if failures:
                self.close()
                raise RuntimeError("RoCE all-reduce setup failed: " + "; ".join(failures))
            self._regions = [mapped(path) for _, path, _ in statuses]
            verdicts = _exchange("the test breaks 'connect' here" if Faults.at == "connect" else None, exchange_group)
            failures = [f"rank {i}: {v}" for i, v in enumerate(verdicts) if v is not None]
            if failures:
                self.close()
                raise RuntimeError("RoCE all-reduce connect failed: " + "; ".join(failures))
        finally:  # whoever was to map it has, or will not
            os.unlink(self._path)

    def should_allreduce(self, inp: torch.Tensor) -> bool:
        self._open()
        nbytes = inp.numel() * inp.element_size()
        fits = 0 < nbytes <= self.max_size and nbytes % PACK_BYTES == 0
        return inp.dtype in SUPPORTED_DTYPES and inp.is_contiguous() and fits

    def all_reduce(
        self,
        inp: torch.Tensor,
        *,
        out: Any = None,
        stream: object = None,
        channel_id: Any = None,
        peer_input_ptrs: Any = None,
        plan,
    ) -> torch.Tensor:
        state = self._prepared(plan)
        self.check_health()
        if not self.should_allreduce(inp):
            raise ValueError("input is not eligible for the RoCE one-shot all-reduce")
        if inp.dtype not in state["dtypes"]:
            raise ValueError("RoCE all-reduce dtype differs from preparation")
        self.calls.append(("all_reduce", inp.nbytes))
        shards = self._meet(inp)
        if shards is not None:
            total = torch.zeros(inp.shape, dtype=torch.float32)
            for source, shard in enumerate(shards):
                value = shard.view(inp.dtype).view(inp.shape).to(torch.float32)
                total = value if source == 0 else total + value
            out.copy_(total.to(inp.dtype))
        return out

    def should_all_gather(self, inp: torch.Tensor, dim: int = -1) -> bool:
        self._open()
        if not inp.is_contiguous() or inp.is_complex() or inp.dtype == torch.bool:
            return False
        return dim % inp.dim() in (0, inp.dim() - 1) and 0 < inp.nbytes <= self.max_gather_bytes

    def all_gather(
        self,
        inp: torch.Tensor,
        *,
        dim: int = -1,
        out: Any = None,
        stream: object = None,
        plan,
    ) -> torch.Tensor:
        self._prepared(plan)
        self.check_health()
        if not self.should_all_gather(inp, dim):
            raise ValueError("input is not eligible for the RoCE all-gather")
        padded = -(-inp.nbytes // PACK_BYTES) * PACK_BYTES
        row = inp.nbytes if dim == 0 else inp.shape[-1] * inp.element_size()
        if (padded != inp.nbytes or row % PACK_BYTES) and padded > self._scratch:
            raise RuntimeError(f"scratch of {self._scratch} bytes cannot hold {padded}")
        self.calls.append(("all_gather", inp.nbytes))
        shards = self._meet(inp)
        if shards is not None:
            out.copy_(torch.cat([s[: inp.nbytes].view(inp.dtype).view(inp.shape) for s in shards], dim=dim))
            if Faults.at == "wrong":
                out.view(-1)[0] += 1
        return out

    def check_health(self) -> None:
        if Faults.broken:
            raise RuntimeError(f"RoCE proxy failed: {Faults.broken}")
        if self._error:
            raise RuntimeError(self._error)

    @property
    def poisoned(self) -> bool:
        return bool(Faults.broken or self._error)

    def stats(self) -> dict[str, Any]:
        return {"ops_posted": 0, "writes_completed": 0, "last_seq": 0, "ctrl_seq": 0, "hcas": list(self.hca_names)}

    def close(self) -> None:
        self._closed = True
        if Faults.hang_in_close:
            time.sleep(3600)

    def _open(self) -> None:
        if self._closed:
            raise RuntimeError("RoCE runtime is closed")

    def _prepared(self, plan: Any) -> dict[str, Any]:
        if plan.state is None:
            raise RuntimeError("comm.roce plan is not prepared")
        if plan.runtime is not self:
            raise ValueError("RoCE plan belongs to another runtime")
        return plan.state

    def _meet(self, inp: torch.Tensor) -> list[torch.Tensor] | None:
        """Every rank's bytes, or None once poisoned: the output stays what it was, and the host sees nothing yet."""
        if Faults.skip:
            Faults.skip -= 1
            return None
        if self._error:
            return None
        seq = self._seq + 1
        slot = seq & 1
        data = inp.reshape(-1).view(torch.uint8).numpy()
        mine = self._regions[self.rank]
        at = _HEAD + slot * self._slot
        mine[at : at + data.size] = data
        mine[slot * 8 : slot * 8 + 8].view(np.uint64)[0] = seq
        deadline = time.monotonic() + Faults.wait_s
        for peer, region in enumerate(self._regions):
            flag = region[slot * 8 : slot * 8 + 8].view(np.uint64)
            while flag[0] != seq:
                if time.monotonic() > deadline:
                    where = f"rank {peer}, HCA 0, at sequence {seq}"
                    self._error = f"RoCE collective on rank {self.rank} timed out waiting for {where}"
                    return None
                time.sleep(0.0002)
        self._seq = seq
        return [torch.from_numpy(region[at : at + data.size].copy()) for region in self._regions]


class Plan:
    def __init__(self, query: Any, runtime: Any) -> None:
        self.query, self.runtime, self.state = query, runtime, None

    def request(
        self,
        *,
        name,
        prepare_call,
        benchmark_call=None,
        dependencies=(),
        collective=None,
        retain_benchmark_call=False,
    ):
        return (self, prepare_call)


def plan(query: Any, *, runtime, invocation: Any = (), override=None) -> Plan:
    return Plan(query, runtime)


def query_from_runtime(
    runtime,
    *,
    surface,
    call,
    topology,
    peer_hosts,
    hca_names=None,
):
    if topology != "roce_rdma" or len(peer_hosts) != runtime.world_size or not all(peer_hosts) or not call["dtypes"]:
        raise ValueError(f"bad query {topology} {peer_hosts} {call}")
    return {"dtypes": tuple(getattr(torch, name) for name in call["dtypes"])}


class PreparedCall:
    def __init__(self, *, run: Any) -> None:
        self.run = run


class PreparationSession:
    def __init__(
        self,
        *,
        device=None,
        autotune=True,
        cache_dir=None,
        namespace=None,
        compile_workers=None,
        rounds=None,
        samples=None,
        cache_only=False,
        race_batch=32,
        race_budget=None,
    ):
        self.closed = False

    def prepare(self, requests, *, coordinator=None, progress=None, autotune=None):
        for one, prepare_call in requests:
            Faults.hit("compile")
            one.runtime._scratch = one.runtime.max_gather_bytes
            state = one.query
            prepare_call(state).run()
            one.state = state

    def close(self) -> None:
        self.closed = True


def load() -> None:
    Faults.hit("build")


def _try_memory(device: torch.device, nbytes: int) -> None:
    Faults.hit("memory")


def library() -> Library:
    if Faults.at == "find":
        raise TransportUnavailable("roce", "b12x 1.3.0 has no comm.roce: pip install 'b12x>=1.5'")
    return Library(
        version="1.5.1",
        source="stand-in",
        bound="polls",
        runtime=RoceOneshotAllReduce,
        plan=plan,
        query=query_from_runtime,
        session=PreparationSession,
        call=PreparedCall,
        build_proxy=load,
        try_memory=_try_memory,
    )


class HostRoceTransport(RoceTransport):
    """RoceTransport over the stand-in."""

    missing = staticmethod(lambda device: None)
    library = staticmethod(library)


__all__ = ["Faults", "HostRoceTransport", "host", "library"]
