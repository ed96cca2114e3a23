"""One-shot collectives between hosts: b12x's RoCEnante (b12x.comm.roce) behind this project's interface.

Every rank RDMA-writes its payload into the pinned memory of all others; one kernel stages, waits and reduces or copies.
Sums are in rank order from rank 0's own value, in fp32, rounded once: the bits of `reference.reduce`. Copies travel as
bytes, so any dtype and dimension goes.

What can fail on one rank alone is done before anything that waits for another rank: environment (comm/roce_env.py),
b12x's surface (_roce_runtime.py), the proxy's compilation and the pinned memory are voted on, then the runtime is built
and its kernels are compiled, that is exchanged too, and only then the first collective runs. Nothing is allocated or
compiled afterwards, so any call may be captured into a CUDA graph; all calls of one capture are on one stream.

A wait on the device ends by b12x's own count of polls (`B12X_ROCE_SPIN_LIMIT`; builds with a time bound:
`B12X_ROCE_TIMEOUT_MS`). What it leaves behind is read by `check`, which must come before results of a replay are used.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, ClassVar, NoReturn

import torch
import torch.distributed as dist

from ..errors import TransportError, TransportUnavailable
from ..layout import MAX_WORLD
from ..ranks import Ranks, groups_joined, join_groups
from ..roce_env import HostFacts, RoceSettings, cross_check, read_host
from ..watch import Watch
from . import _roce_runtime
from .base import Call, Transport, as_bytes

__all__ = ["RoceTransport"]

_PACK = 16  # b12x moves whole packs of 16 bytes
_CLOSE_WAIT_S = 2.0
_SUMS = ("all_reduce", "reduce_scatter")
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class RoceTransport(Transport):
    """Tests replace `missing` and `library`."""

    name = "roce"
    one_shot = True
    missing: ClassVar[Callable[[torch.device], str | None]] = staticmethod(_roce_runtime.missing)
    library: ClassVar[Any] = staticmethod(_roce_runtime.find)

    def __init__(self, ranks: Ranks, watch: Watch) -> None:
        super().__init__(ranks, watch)
        self.settings = RoceSettings.from_env(rank=ranks.rank)
        self.capacity = self.settings.max_bytes
        self.facts = read_host(self.settings, ranks.size)
        self._library: _roce_runtime.Library = type(self).library()
        self._runtime: Any = None
        self._session: Any = None
        self._plan: Any = None
        self._connected = False
        self._counters: dict[str, int] = {}

    @property
    def memory_bytes(self) -> int:
        """Pinned host memory, and the runtime's scratch on the device: for unaligned sums and for padded gathers."""
        return self.settings.region_bytes(self.ranks.size) + (self.ranks.size + 3) * self.capacity

    @classmethod
    def probe(cls, ranks: Ranks) -> str | None:
        if not 2 <= ranks.size <= MAX_WORLD:
            return f"it serves 2 to {MAX_WORLD} ranks, this group has {ranks.size}"
        if ranks.kind != "torch":
            return "the ranks were joined by MPI: b12x needs a torch.distributed group"
        reason = cls.missing(ranks.device)
        if reason is not None:
            return reason
        problems = list(read_host(RoceSettings.from_env(rank=ranks.rank), ranks.size).problems)
        try:
            cls.library()
        except TransportUnavailable as error:
            problems.append(error.reason)
        return "; ".join(problems) or None

    def allocate(self) -> bytes:
        self._library.build_proxy()
        self._library.try_memory(self.ranks.device, self.settings.region_bytes(self.ranks.size))
        said = {
            "facts": self.facts.as_json(),
            "DSV41_ROCE_MAX_MIB": self.settings.max_mib,
            "b12x": [self._library.version, self._library.source, self._library.bound],
            "groups": groups_joined(),
        }
        return json.dumps(said).encode()

    def attach(self, blobs: Sequence[bytes]) -> None:
        everyone = [json.loads(blob) for blob in blobs]
        # Every rank compares the same blobs, so either all go on or none does.
        wrong = cross_check([HostFacts.from_json(said["facts"]) for said in everyone])
        for what in ("DSV41_ROCE_MAX_MIB", "b12x"):
            if len({str(said[what]) for said in everyone}) > 1:
                wrong.append(f"{what} differs: {', '.join(f'rank {r} {s[what]}' for r, s in enumerate(everyone))}")
        if wrong:
            raise TransportUnavailable("roce", "; ".join(wrong))
        members = dist.get_process_group_ranks(self.ranks.cpu_group)
        bound = timedelta(seconds=0.8 * self.watch.bound_s)
        # One more than anybody has: the next attempt gets another name than this one's, whose addresses stay in the
        # store.
        join_groups(max(int(said["groups"]) for said in everyone) + 1)
        # A group of its own: a rank that fails in here takes its end down, and the others' exchange fails at once.
        group: Any = dist.new_group(members, backend="gloo", timeout=bound, use_local_synchronization=True)
        try:
            self._connect(group, [said["facts"]["host"] for said in everyone])
        finally:
            dist.destroy_process_group(group)
        self._connected = True

    def takes(self, call: Call, nbytes: int) -> bool:
        if call.op in _SUMS and (call.reduce_op != "sum" or call.dtype not in _DTYPES):
            return False
        return nbytes <= self.capacity

    def all_reduce(self, x: torch.Tensor, op: str, out: torch.Tensor) -> None:
        runtime = self._ready()
        if x.nbytes % _PACK == 0:
            self._guarded(lambda: runtime.all_reduce(x, out=out, plan=self._plan))
            return
        padded = x.new_zeros(-(-x.nbytes // _PACK) * _PACK // x.element_size())
        padded[: x.numel()].copy_(x.reshape(-1))
        self._guarded(lambda: runtime.all_reduce(padded, out=padded, plan=self._plan))
        out.view(-1).copy_(padded[: x.numel()])

    def reduce_scatter(self, x: torch.Tensor, op: str, out: torch.Tensor) -> None:
        total = torch.empty_like(x)
        self.all_reduce(x, op, total)
        out.copy_(total.view(self.ranks.size, *out.shape)[self.ranks.rank])

    def all_gather(self, x: torch.Tensor, dim: int, out: torch.Tensor) -> None:
        # As rows of bytes: b12x refuses some dtypes and all middle dimensions, and writes the last one in place.
        rows = math.prod(x.shape[:dim])
        runtime, send, to = self._ready(), as_bytes(x).view(rows, -1), as_bytes(out).view(rows, -1)
        self._guarded(lambda: runtime.all_gather(send, dim=-1, out=to, plan=self._plan))

    def all_gather_rows(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self.all_gather(x.reshape(-1), 0, out)

    def broadcast(self, x: torch.Tensor, src: int) -> None:
        everyone = torch.empty((self.ranks.size, x.nbytes), dtype=torch.uint8, device=x.device)
        self.all_gather_rows(as_bytes(x), everyone)
        as_bytes(x).copy_(everyone[src])

    def barrier(self) -> None:
        mark = torch.zeros(_PACK, dtype=torch.uint8, device=self.ranks.device)
        self.all_gather_rows(mark, mark.new_empty(self.ranks.size * _PACK))
        self.watch.wait_device()
        self.check()

    def check(self) -> None:
        if self._runtime is not None and self._runtime.poisoned:
            self._guarded(self._runtime.check_health)

    def close(self) -> None:
        runtime, self._runtime = self._runtime, None
        session, self._session = self._session, None
        if runtime is None:
            return
        # b12x waits for the device first, and a kernel that never ends would hold us: the process's end frees the rest.
        worker = threading.Thread(target=_close, args=(runtime, self.ranks.size), daemon=True)
        worker.start()
        worker.join(2 * _CLOSE_WAIT_S)
        if session is not None and not worker.is_alive():
            with contextlib.suppress(Exception):
                session.close()

    def _connect(self, group: Any, hosts: list[str]) -> None:
        self._runtime = self._library.runtime(
            exchange_group=group,
            device=self.ranks.device,
            max_size=self.capacity,
            max_gather_bytes=self.capacity,  # scratch is sized from it once: it must be right before preparation
            hca_names=[hca.name for hca in self.facts.hcas],
            gid_index=self.facts.gid_index,
        )
        error: str | None = None
        try:
            self._prepare(hosts)
        except Exception as problem:
            error = f"{type(problem).__name__}: {problem}"
        said: list[Any] = [None] * self.ranks.size
        dist.all_gather_object(said, error, group=group)
        failed = [f"rank {rank}: {text}" for rank, text in enumerate(said) if text is not None]
        if failed:
            raise TransportUnavailable("roce", f"preparation failed: {'; '.join(failed)}")
        self._counters = _roce_runtime.error_counters(self.settings.root, [hca.name for hca in self.facts.hcas])
        self._try_out()

    def _prepare(self, hosts: list[str]) -> None:
        """One plan for sums and copies: compile and allocate, and launch nothing that waits for another rank."""
        query = self._library.query(
            self._runtime,
            surface="AllReduce.all_reduce",
            call={"dtypes": tuple(str(dtype).removeprefix("torch.") for dtype in _DTYPES)},
            topology="roce_rdma",
            peer_hosts=hosts,
        )
        plan = self._library.plan(query, runtime=self._runtime)
        self._session = self._library.session(device=self.ranks.device, autotune=False, compile_workers=0)
        nothing = self._library.call(run=lambda: None)
        self._session.prepare((plan.request(name="dsv41_dist.roce", prepare_call=lambda state: nothing),))
        self._plan = plan

    def _try_out(self) -> None:
        """The first collectives: every kernel once, before any capture, and their results compared."""
        rank, world, device = self.ranks.rank, self.ranks.size, self.ranks.device
        for width in (1, _PACK):  # the padded way and the direct one
            mine = torch.full((2, width), rank, dtype=torch.uint8, device=device)
            everyone = mine.new_empty((2, width * world))
            self.all_gather(mine, 1, everyone)
            want = torch.arange(world, dtype=torch.uint8, device="cpu").repeat_interleave(width).repeat(2, 1)
            self._same("all_gather", everyone, want)
        for dtype in _DTYPES:
            total = torch.full((_PACK,), float(rank + 1), dtype=dtype, device=device)
            self.all_reduce(total, "sum", total)
            self._same("all_reduce", total, torch.full((_PACK,), world * (world + 1) / 2, dtype=dtype, device="cpu"))

    def _same(self, what: str, got: torch.Tensor, want: torch.Tensor) -> None:
        self.watch.wait_device()
        self._runtime.check_health()
        if not torch.equal(got.cpu(), want):
            raise TransportError(f"roce: the first {what} on rank {self.ranks.rank} gave {got.tolist()}, wanted {want}")

    def _ready(self) -> Any:
        runtime = self._runtime
        if runtime is None:
            raise TransportError("roce: not connected, or closed")
        if runtime.max_gather_bytes != self.capacity or runtime.max_size != self.capacity:
            self.watch.report(
                f"roce: rank {self.ranks.rank}'s runtime was changed after it was connected: max_size "
                f"{runtime.max_size}, max_gather_bytes {runtime.max_gather_bytes}, agreed on was {self.capacity}"
            )
        return runtime

    def _guarded(self, act: Callable[[], Any]) -> None:
        try:
            act()
        except (RuntimeError, ValueError) as error:
            if not self._connected:
                raise  # it is voted on
            self._fail(str(error))

    def _fail(self, text: str) -> NoReturn:
        peer = re.search(r"(?:waiting for|to) rank (\d+)", text)
        now = _roce_runtime.error_counters(self.settings.root, [hca.name for hca in self.facts.hcas])
        moved = [f"{name} +{value - self._counters.get(name, 0)}" for name, value in now.items()]
        moved = [text for text in moved if not text.endswith("+0")]
        detail = f" (since the start: {', '.join(moved)})" if moved else ""
        self.watch.report(f"roce: {text}{detail}", [int(peer[1])] if peer else [])


def _close(runtime: Any, world: int) -> None:
    """Close when this rank's last writes have left: a kernel ends on its peers' data, not on its own being sent."""
    with contextlib.suppress(Exception):
        deadline = time.monotonic() + _CLOSE_WAIT_S
        while not runtime.poisoned and time.monotonic() < deadline:
            stats = runtime.stats()
            due = stats["ops_posted"] * (world - 1) * len(stats["hcas"])
            rung = stats["ctrl_seq"] & 0xFFFFFFFF
            if stats["last_seq"] == rung and stats["writes_completed"] >= due:
                break
            time.sleep(0.001)
    with contextlib.suppress(Exception):
        runtime.close()
