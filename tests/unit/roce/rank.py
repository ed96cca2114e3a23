"""One rank of test_roce_transport: python -m tests.unit.roce.rank SCENARIO,.. RANK WORLD PORT. Prints one JSON line."""

from __future__ import annotations

import json
import os
import time
import warnings

import torch
import torch.distributed as dist

from dsv41_dist.comm import reference
from dsv41_dist.comm.communicator import Communicator
from dsv41_dist.comm.errors import CommError, RankTimeout
from dsv41_dist.comm.layout import Split
from dsv41_dist.comm.ranks import Ranks
from dsv41_dist.comm.settings import CommSettings

from ..stand_in_ranks import main
from .stand_in import Faults, HostRoceTransport

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def communicator(ranks: Ranks, timeout_s: float = 20.0) -> Communicator:
    return Communicator.create(ranks, ["roce"], None, CommSettings(timeout_s=timeout_s, init_timeout_s=30.0))


def roce_of(comm: Communicator) -> HostRoceTransport:
    transport = comm.transports["roce"]
    assert isinstance(transport, HostRoceTransport)
    return transport


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def collectives(ranks: Ranks) -> dict[str, object]:
    """Every operation against reference.py; sizes that are and are not whole packs; every dtype as bytes."""
    comm = communicator(ranks)
    world, rank, checked = ranks.size, ranks.rank, 0
    generator = torch.Generator().manual_seed(11)
    for step in range(12):
        dtype = DTYPES[step % 3]
        n = (8, 3, 700, 9001)[step % 4] * world
        shards = [torch.randn(n, generator=generator).to(dtype) for _ in range(world)]
        shards[0][:2] = -0.0
        x = shards[rank]
        wide = [torch.randn(3, 2, 5, generator=generator).to(dtype) for _ in range(world)]
        pairs = [
            (comm.all_reduce(x, label="sum"), reference.all_reduce(shards)),
            (comm.reduce_scatter(x, label="part"), reference.reduce_scatter(shards, rank)),
            (comm.all_gather(x, label="rows"), reference.all_gather(shards)),
        ]
        pairs += [(comm.all_gather(wide[rank], d, label="wide"), reference.all_gather(wide, d)) for d in (0, 1, 2)]
        split = Split(5 * world - 2, (*(5,) * (world - 1), 3))
        flat = [w.reshape(6, 5) for w in wide]
        uneven = [w[:, : split.size(r)].contiguous() for r, w in enumerate(flat)]
        got = comm.all_gather_columns(uneven[rank], split, label="columns")
        pairs.append((got, reference.all_gather_columns(uneven, split)))
        src = step % world
        pairs.append((comm.broadcast(x.clone(), src, label="cast"), shards[src]))
        inplace = x.clone()
        pairs.append((comm.all_reduce(inplace, out=inplace, label="inplace"), reference.all_reduce(shards)))
        for a, b in pairs:
            assert same(a, b), (step, dtype, n)
            checked += 1
    for dtype in (torch.bool, torch.int64, torch.complex64, torch.float8_e4m3fn, torch.float64):
        shards = [torch.randn(4, 6, generator=generator).to(dtype) for _ in range(world)]
        assert same(comm.all_gather(shards[rank], 1, label="any"), reference.all_gather(shards, 1))
        checked += 1
    roce_of(comm).barrier()
    # Not its own: other sums, other dtypes, larger than the agreed size.
    assert comm.all_reduce(torch.ones(4, dtype=torch.int64), label="ints").tolist() == [world] * 4
    assert comm.all_reduce(torch.ones(4), "max", label="max").tolist() == [1.0] * 4
    big = torch.zeros((1 << 20) + 1, dtype=torch.uint8)
    routes = [comm.route_name("all_gather", big), comm.route_name("all_gather", big[:-1])]
    calls = len(roce_of(comm)._runtime.calls)
    comm.close()
    return {"checked": checked, "routes": routes, "calls": calls}


def one_fails(ranks: Ranks) -> list[dict[str, object]]:
    """For each case of CASES (where rank 1 breaks, what it has set), one attempt to connect."""
    out: list[dict[str, object]] = []
    for at, variables in json.loads(os.environ["CASES"]):
        if ranks.rank == 1:
            Faults.at = at
            os.environ.update(variables)
        started = time.monotonic()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            comm = communicator(ranks)
        took = time.monotonic() - started
        total = comm.all_reduce(torch.ones(3), label="after")
        out.append(
            {
                "transports": sorted(comm.transports),
                "warnings": [str(w.message) for w in said if "roce" in str(w.message)],
                "took": took,
                "total": total.tolist(),
            }
        )
        comm.close()
        if ranks.rank == 1:
            Faults.at = ""
            os.environ.update({name: START.get(name, "") for name in variables})
    return out


START = dict(os.environ)


def missing_rank(ranks: Ranks, spoil) -> dict[str, object]:
    """A failure after the first use is final, on every rank, with the rank that was missing."""
    comm = communicator(ranks, timeout_s=2.0)
    x = torch.ones(1000, dtype=torch.bfloat16)
    comm.all_reduce(x, label="warm")
    if ranks.rank == 1:
        spoil(roce_of(comm))
    caught: CommError | None = None
    try:
        comm.all_reduce(x, label="layer.7.reduce")
        comm.check()
        if ranks.rank == 1:  # it is late: it learns of the verdict at its next call
            time.sleep(3.0)
            comm.all_reduce(x, label="layer.7.reduce")
            comm.check()
    except CommError as error:
        caught = error
    final = None
    try:
        comm.all_reduce(x, label="afterwards")
    except CommError as error:
        final = type(error).__name__
    started = time.monotonic()
    comm.close()
    dist.barrier()
    Faults.skip, Faults.broken = 0, ""
    return {
        "missing": caught.missing if isinstance(caught, RankTimeout) else None,
        "kind": type(caught).__name__,
        "text": str(caught),
        "final": final,
        "closing": time.monotonic() - started,
    }


def skip(roce: HostRoceTransport) -> None:
    Faults.skip = 1


def raise_attribute(roce: HostRoceTransport) -> None:
    roce._runtime.max_gather_bytes *= 2


def break_proxy(roce: HostRoceTransport) -> None:
    Faults.broken = "RDMA write to rank 2 failed: transport retry counter exceeded (vendor_err 0x81, seq 7)"


def hang_in_close(ranks: Ranks) -> dict[str, object]:
    comm = communicator(ranks)
    comm.all_reduce(torch.ones(8), label="warm")
    Faults.hang_in_close = ranks.rank == 1
    started = time.monotonic()
    comm.close()
    return {"closing": time.monotonic() - started}


def preflight(ranks: Ranks) -> list[dict[str, object]]:
    """preflight's RoCE section, for each case of PREFLIGHT (what rank 2's folder is, what it has set)."""
    from dsv41_dist.cli import roce_checks  # noqa: F401
    from dsv41_dist.cli.checks import CHECKS, Context

    (found,) = [check for check in CHECKS if check.name == "roce"]
    comm = Communicator.create(ranks)
    out: list[dict[str, object]] = []
    for variables in json.loads(os.environ["PREFLIGHT"]):
        if ranks.rank == 2:
            os.environ.update(variables)
        context = Context(ranks, comm, None, "cpu", "process_group", "own")
        started = time.monotonic()
        wanted = found.wanted(context)
        result = found.run(context)
        took = time.monotonic() - started
        out.append({"wanted": wanted, "reasons": result.reasons, "rows": result.rows, "took": took})
        if ranks.rank == 2:
            os.environ.update({name: START.get(name, "") for name in variables})
    for name in ("DSV41_ROCE_ROOT", "DSV41_ONESHOT", "DSV41_ROCE_GATHER"):
        os.environ.pop(name, None)
    out.append({"wanted": found.wanted(context)})
    comm.close()
    return out


SCENARIOS = {
    "preflight": preflight,
    "collectives": collectives,
    "one_fails": one_fails,
    "skip": lambda ranks: missing_rank(ranks, skip),
    "late_raise": lambda ranks: missing_rank(ranks, raise_attribute),
    "proxy_error": lambda ranks: missing_rank(ranks, break_proxy),
    "hang_in_close": hang_in_close,
}


if __name__ == "__main__":
    main("roce", HostRoceTransport, SCENARIOS)
