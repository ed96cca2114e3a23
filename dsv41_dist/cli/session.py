"""Joining a group from the command line: under torchrun, under mpirun, or as a rank set started here.

An exception on one rank ends the group: one line that names the rank, and a non-zero exit code within seconds.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from ..comm.errors import ArgumentError
from ..comm.layout import MAX_WORLD
from ..comm.settings import CommSettings

__all__ = ["Place", "choose_place", "join", "run"]

_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_MPI = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")


class Place:
    """Where this process runs: `launcher` is torchrun, mpirun or own; `rank`/`size` as the launcher tells."""

    def __init__(self, launcher: str, rank: int, size: int) -> None:
        self.launcher = launcher
        self.rank = rank
        self.size = size

    @property
    def speaks(self) -> bool:
        """Whether this process prints: rank 0, or the starter of its own ranks."""
        return self.rank == 0


def choose_place(ranks: int | None, env: Mapping[str, str] | None = None) -> Place:
    """Find the launcher. Raises ArgumentError for mixed launchers, a bad rank count, or a missing mpi4py."""
    env = os.environ if env is None else env
    mpi = next((name for name in _MPI if name in env), None)
    torchrun = all(name in env for name in _TORCHRUN)
    if mpi and torchrun:
        raise ArgumentError(
            f"mixed launchers: RANK={env['RANK']!r} is torchrun's and {mpi}={env[mpi]!r} is mpirun's; use one of them"
        )
    if ranks is not None and not 1 <= ranks <= MAX_WORLD:
        raise ArgumentError(f"--ranks {ranks}: allowed is 1 to {MAX_WORLD}")
    if not mpi and not torchrun:
        return Place("own", 0, 4 if ranks is None else ranks)
    launcher = "mpirun" if mpi else "torchrun"
    if mpi:
        size = next((_number(env, name) for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE") if env.get(name)), 1)
        place = Place(launcher, _number(env, mpi), size)
    else:
        place = Place(launcher, _number(env, "RANK"), _number(env, "WORLD_SIZE"))
    if ranks is not None:
        raise ArgumentError(f"--ranks {ranks}: {launcher} has started {place.size} ranks already; leave --ranks out")
    if mpi and not _importable("mpi4py"):
        raise ArgumentError(
            f"{mpi}={env[mpi]!r}: started by mpirun, but mpi4py is missing: pip install 'dsv41-dist[mpi]'"
        )
    return place


def choose_device(device: str) -> str:
    """auto, cpu or cuda -> cpu or cuda. Raises ArgumentError for another word, or cuda without a GPU."""
    if device not in ("auto", "cpu", "cuda"):
        raise ArgumentError(f"--device {device!r}: allowed is auto, cpu, cuda")
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise ArgumentError("--device 'cuda': torch sees no GPU here; allowed is cpu")
    return "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"


def choose_transport(transport: str, launcher: str, device: str) -> str:
    """auto -> mpi under mpirun with CPU tensors, else process_group. Raises ArgumentError for an unknown one."""
    from ..comm.transports import TRANSPORTS

    if transport != "auto" and transport not in TRANSPORTS:
        raise ArgumentError(f"--transport {transport!r}: allowed is auto, {', '.join(TRANSPORTS)}")
    if transport == "mpi" and launcher != "mpirun":
        raise ArgumentError(f"--transport 'mpi': the ranks are started by {launcher}; start them with mpirun")
    if transport == "peer" and device != "cuda":
        raise ArgumentError(
            f"--transport 'peer': it is for GPUs, the device is {device}; allowed is process_group, mpi"
        )
    if transport == "auto":
        return "mpi" if launcher == "mpirun" and device == "cpu" else "process_group"
    return transport


def join(launcher: str, device: str, transport: str, settings: CommSettings) -> Any:
    """The Ranks of this group. Collective. `device` is cpu or cuda; a rank takes the GPU of its local rank."""
    import torch

    from ..comm.ranks import Ranks

    place: Any = device
    if device == "cuda":
        local = int(os.environ.get("LOCAL_RANK") or os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK") or 0)
        place = torch.device("cuda", local % torch.cuda.device_count())
        torch.cuda.set_device(place)
    if transport == "mpi":
        return Ranks.from_mpi(device=place, timeout_s=settings.init_timeout_s)
    import torch.distributed as dist

    if launcher == "mpirun":
        _torch_environment_from_mpi()
    # The backend's own bound is behind ours: we want to name who is missing before it aborts.
    bound = timedelta(seconds=max(settings.init_timeout_s, 2 * settings.timeout_s + 30))
    options: dict[str, Any] = {"device_id": place} if device == "cuda" else {}
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=bound, **options)
    return Ranks.from_torch(device=place)


def run(place: Place, target: Callable[..., Any], *args: Any, timeout_s: float = 3600.0) -> int:
    """Run target(rank, size, *args) on every rank and return this process's exit code.

    `target` returns an exit code; own ranks: the largest of them. A rank that raises ends the group with 1.
    """
    if place.launcher == "own":
        from .spawn import run_ranks

        results = run_ranks(place.size, target, *args, timeout_s=timeout_s)
        ended_badly = any(result.error is not None or result.exitcode not in (0, None) for result in results)
        code = 0
        for result in results:
            if result.error is not None:
                print(f"rank {result.rank}: {result.error}", file=sys.stderr)
                code = max(code, 1)
            elif result.exitcode is None or result.exitcode < 0 or (result.exitcode and result.value is None):
                # A rank that was killed while it waited for one that had ended is no news.
                if result.exitcode is not None or not ended_badly:
                    print(f"rank {result.rank} {_ending(result.exitcode, timeout_s)}", file=sys.stderr)
                code = max(code, 1)
            else:
                code = max(code, int(result.value or 0))
        return code
    try:
        code = int(target(place.rank, place.size, *args) or 0)
    except BaseException as error:
        print(f"rank {place.rank}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        end_group(place.launcher, 1)
    leave(place.launcher, code)
    return code


def leave(launcher: str, code: int) -> None:
    """Exit without waiting for backend threads; under MPI after Finalize, which meets the other ranks."""
    sys.stdout.flush()
    sys.stderr.flush()
    if launcher == "mpirun":
        return
    os._exit(code)


def end_group(launcher: str, code: int) -> None:
    """End this rank so that its launcher ends the others."""
    sys.stdout.flush()
    if launcher == "mpirun":
        from mpi4py import MPI

        MPI.COMM_WORLD.Abort(code)
    os._exit(code)


def _torch_environment_from_mpi() -> None:
    import socket

    from mpi4py import MPI

    world = MPI.COMM_WORLD
    address = None
    if world.Get_rank() == 0:
        with socket.socket() as probe:
            probe.bind(("", 0))
            one_host = world.Get_size() == int(os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "0"))
            address = ("127.0.0.1" if one_host else socket.getfqdn(), str(probe.getsockname()[1]))
    host, port = world.bcast(address, 0)
    os.environ.update(MASTER_ADDR=host, MASTER_PORT=port, RANK=str(world.Get_rank()), WORLD_SIZE=str(world.Get_size()))


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _ending(exitcode: int | None, timeout_s: float) -> str:
    if exitcode is None:
        return f"did not end within {timeout_s:g} s and was killed"
    if exitcode > 0:
        return f"ended with exit code {exitcode} before it had a result"
    return f"was ended by signal {-exitcode}"


def _number(env: Mapping[str, str], name: str) -> int:
    try:
        return int(env[name])
    except ValueError:
        raise ArgumentError(f"{name}={env[name]!r}: allowed is an integer") from None
