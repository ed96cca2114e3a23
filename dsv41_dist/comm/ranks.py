"""Who is in the group. A `Ranks` is a frozen view: it starts nothing and owns nothing but its side-channel store."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from .errors import ArgumentError, TransportError, TransportUnavailable
from .layout import MAX_WORLD

__all__ = ["HostIdentity", "Ranks", "backend_for", "groups_joined", "host_identity", "join_groups"]

_gloo_groups: dict[str, int] = {}  # how many of our own were made over the same members, for the store's keys


@dataclass(frozen=True)
class Ranks:
    """A group as one of its ranks sees it.

    Attributes:
        rank, size: this rank within the group, and how many there are (1 to 16).
        device: where data tensors live.
        cpu_group: what agreement runs over: a gloo ProcessGroup, or an MPI communicator.
        device_group: what data runs over (NCCL or gloo, or the MPI communicator).
        store: a torch store all ranks reach, through which a missing rank is named; None for a group of one.
        name: tells this group's side channel from those of other groups of the same job.
        kind: "torch" or "mpi".
    """

    rank: int
    size: int
    device: torch.device
    cpu_group: Any
    device_group: Any
    store: dist.Store | None
    name: str = "group"
    kind: str = "torch"

    def __post_init__(self) -> None:
        if not 1 <= self.size <= MAX_WORLD:
            raise ArgumentError(f"world size {self.size}: allowed is 1 to {MAX_WORLD}")
        if not 0 <= self.rank < self.size:
            raise ArgumentError(f"rank {self.rank} of {self.size}: allowed is 0 to {self.size - 1}")

    @classmethod
    def from_torch(cls, group: dist.ProcessGroup | None = None, device: torch.device | str | None = None) -> Ranks:
        """The ranks of a torch process group (the default group when None).

        Collective over the group: agreement gets a gloo group of its own, so that a vote never meets a data call.
        Raises ArgumentError when torch.distributed is not initialised, TransportError naming a rank that does not come
        within the default group's time-out.
        """
        if not dist.is_initialized():
            raise ArgumentError(
                "torch.distributed is not initialised: call init_process_group first, or use Ranks.from_mpi"
            )
        data = dist.group.WORLD if group is None else group
        assert data is not None
        members = dist.get_process_group_ranks(data)
        control: Any = data
        if len(members) > 1:
            control = _gloo_group(members)
        return cls(
            rank=dist.get_rank(data),
            size=len(members),
            device=_device(device, data),
            cpu_group=control,
            device_group=data,
            store=_side_store(members),
            name=_group_name(members),
        )

    @classmethod
    def from_object(cls, group: Any, device: torch.device | str | None = None) -> Ranks:
        """The ranks of any object with world_size, cpu_group, device_group and rank_in_group (or rank), such as
        SGLang's GroupCoordinator. Nothing collective: the object's own groups are used."""
        for name in ("world_size", "cpu_group", "device_group"):
            if not hasattr(group, name):
                raise ArgumentError(f"{type(group).__name__} has no attribute {name!r}: it does not describe a group")
        # SGLang's `rank` is the global rank; `rank_in_group` is the one that counts here.
        rank = getattr(group, "rank_in_group", None)
        rank = int(group.rank if rank is None else rank)
        members = dist.get_process_group_ranks(group.cpu_group)
        where = device if device is not None else getattr(group, "device", None)
        return cls(
            rank=rank,
            size=int(group.world_size),
            device=_device(where, group.device_group),
            cpu_group=group.cpu_group,
            device_group=group.device_group,
            store=_side_store(members),
            name=_group_name(members),
        )

    @classmethod
    def from_mpi(cls, comm: Any = None, device: torch.device | str | None = None, timeout_s: float = 300.0) -> Ranks:
        """The ranks of an MPI communicator (COMM_WORLD when None), through mpi4py. Collective: duplicates it.

        Rank 0 serves a torch store as the side channel, so it must be reachable from every host by its name.
        Raises TransportUnavailable when mpi4py is missing.
        """
        try:
            from mpi4py import MPI
        except ImportError as error:
            raise TransportUnavailable(
                "mpi", f"mpi4py does not import ({error}): pip install 'dsv41-dist[mpi]'"
            ) from None
        base = MPI.COMM_WORLD if comm is None else comm
        rank, size = base.Get_rank(), base.Get_size()
        data = base.Dup()
        store: dist.Store | None = None
        if size > 1:
            bound = timedelta(seconds=timeout_s)
            one_host = base.Split_type(MPI.COMM_TYPE_SHARED).Get_size() == size
            host = "127.0.0.1" if one_host else socket.getfqdn()
            if rank == 0:
                server = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=bound)
                base.bcast((host, server.port), 0)
                store = server
            else:
                host, port = base.bcast(None, 0)
                store = dist.TCPStore(host, port, is_master=False, timeout=bound)
        where = torch.device("cpu") if device is None else torch.device(device)
        return cls(
            rank=rank,
            size=size,
            device=where,
            cpu_group=base.Dup(),
            device_group=data,
            store=store,
            name="mpi",
            kind="mpi",
        )

    def without(self, missing: list[int]) -> Ranks:
        """The ranks that are left after a RankTimeout, as a group of their own over gloo (the idea of ULFM's shrink).

        Collective over the ranks that are left; they are renumbered in order. Only for torch groups.
        """
        if self.kind != "torch":
            raise ArgumentError("without(): an MPI job ends with its first lost rank")
        if self.rank in missing:
            raise ArgumentError(f"without({missing}): rank {self.rank} is itself among the missing")
        members = dist.get_process_group_ranks(self.device_group)
        left = [member for index, member in enumerate(members) if index not in missing]
        return Ranks.from_torch(_gloo_group(left), "cpu" if self.device.type == "cpu" else self.device)


def _device(device: torch.device | str | None, group: Any) -> torch.device:
    if device is not None:
        return torch.device(device)
    if backend_for(group, "cuda") == "nccl" and (backend_for(group, "cpu") != "gloo" or torch.cuda.is_available()):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def backend_for(group: Any, kind: str) -> str:
    """Which backend of a torch group serves tensors on `kind` ("cpu", "cuda"). A group may have one for each:
    `init_process_group()` without a backend makes "cpu:gloo,cuda:nccl"."""
    served = dict(part.split(":", 1) for part in dist.get_backend_config(group).split(","))
    return served.get(kind, "none")


def groups_joined() -> int:
    """In how many torch groups this process is."""
    from torch.distributed import distributed_c10d as c10d

    return len(c10d._world.pg_names)  # pyright: ignore[reportPrivateUsage]


def join_groups(count: int) -> None:
    """Make gloo groups of this rank alone until it is in `count` groups.

    torch names a group that only its members make after them and after the number of groups this rank is in. Ranks in
    different numbers of groups would wait for each other under different names.
    """
    for _ in range(count - groups_joined()):
        dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)


def _gloo_group(members: list[int]) -> Any:
    """A gloo group of its own, made by its members alone."""
    store = _side_store(members)
    if store is not None:
        join_groups(max(_exchange_groups_joined(members, store)))
    return dist.new_group(members, backend="gloo", use_local_synchronization=True)


def _exchange_groups_joined(members: list[int], store: dist.Store) -> list[int]:
    name = _group_name(members)
    number = _gloo_groups[name] = _gloo_groups.get(name, 0) + 1
    store.set(f"groups/{number}/{dist.get_rank()}", str(groups_joined()))
    counts: list[int] = []
    for member in members:
        try:
            counts.append(int(store.get(f"groups/{number}/{member}")))
        except RuntimeError as error:
            raise TransportError(
                f"a group of the ranks {members}: rank {member} did not come ({str(error).splitlines()[0]}): every one "
                "of them must call this, in the same order"
            ) from None
    return counts


def _side_store(members: list[int]) -> dist.Store | None:
    """A connection of our own to the default store: a blocking call of someone else's must not hold it up."""
    if len(members) == 1:
        return None
    from torch.distributed import distributed_c10d as c10d

    store: Any = c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]
    return dist.PrefixStore(f"dsv41/{_group_name(members)}", store.clone())


def _group_name(members: list[int]) -> str:
    return "-".join(map(str, members))


@dataclass(frozen=True)
class HostIdentity:
    """Enough to look at another rank's process from here: its host and process table, and the process itself."""

    host: str
    table: str
    pid: int


@lru_cache(maxsize=1)
def _host_table() -> str:
    parts: list[str] = []
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            parts.append(file.read().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    except OSError:
        return ""
    return "/".join(parts)


def host_identity() -> HostIdentity:
    """This process, as other ranks of the same host can find it in /proc."""
    return HostIdentity(socket.gethostname(), _host_table(), os.getpid())
