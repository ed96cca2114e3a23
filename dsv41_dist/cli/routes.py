"""`bench --routes`: measure every transport at every size, and print (and save) the route table that follows."""

from __future__ import annotations

from dataclasses import dataclass

from ..comm.settings import CommSettings

__all__ = ["RoutesPlan", "run_routes"]


@dataclass(frozen=True)
class RoutesPlan:
    """`transports` are tried beyond the base one; `sizes` in bytes, ascending."""

    launcher: str
    device: str
    transports: tuple[str, ...]
    sizes: tuple[int, ...]
    save: str | None


def run_routes(rank: int, size: int, plan: RoutesPlan) -> int:
    """Join, calibrate, and on rank 0 print one line per operation and size, then the routes. Returns the exit code."""
    from ..comm import Communicator, calibrate
    from .session import join

    settings = CommSettings.from_env()
    base = "mpi" if plan.launcher == "mpirun" and plan.device == "cpu" else "process_group"
    comm = Communicator.create(join(plan.launcher, plan.device, base, settings), plan.transports, settings=settings)
    made = calibrate(comm, sizes=plan.sizes, label="bench:routes")
    if rank == 0:
        names = sorted(comm.transports)
        print(f"# dsv41_dist routes: {size} ranks, {plan.device}, bf16, us per call of the slowest rank")
        print(f"{'op':<20}{'bytes':>12}" + "".join(f"{name:>15}" for name in names) + "  fastest")
        for op, nbytes, times in made.rows:
            cells = "".join(f"{times[name]:>15.2f}" if name in times else f"{'-':>15}" for name in names)
            print(f"{op:<20}{nbytes:>12}{cells}  {min(times, key=lambda name: times[name])}")
        print("# routes, by what one rank sends")
        for route in made.table.routes:
            most = "any size" if route.max_bytes is None else f"up to {route.max_bytes} bytes"
            print(f"{route.op:<20}{most:<24}{route.transport}")
        print(f"{'everything else':<44}{made.table.fallback}")
        print(f"# digest {made.table.digest()}")
        if plan.save:
            made.save(plan.save)
    comm.barrier(label="bench:routes:done")
    comm.close()
    return 0
