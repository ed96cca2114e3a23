"""One rank of test_peer_transport: python -m tests.unit.peer_rank SCENARIO,.. RANK WORLD PORT. Prints one JSON line."""

from __future__ import annotations

import json
import os
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

from dsv41_dist.comm import reference
from dsv41_dist.comm.calibrate import Calibration, calibrate
from dsv41_dist.comm.communicator import Communicator
from dsv41_dist.comm.errors import ArgumentError, CommError, RankTimeout
from dsv41_dist.comm.layout import Split
from dsv41_dist.comm.ranks import Ranks
from dsv41_dist.comm.routing import Route, RouteTable
from dsv41_dist.comm.settings import CommSettings

from .kernels.peer_host import misaligned
from .kernels.peer_process import HostPeerTransport, ProcessDevice
from .stand_in_ranks import main

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def communicator(ranks: Ranks, timeout_s: float = 20.0, table: RouteTable | None = None) -> Communicator:
    return Communicator.create(ranks, ["peer"], table, CommSettings(timeout_s=timeout_s, init_timeout_s=60.0))


def peer_of(comm: Communicator) -> HostPeerTransport:
    transport = comm.transports["peer"]
    assert isinstance(transport, HostPeerTransport)
    return transport


def collectives(ranks: Ranks) -> dict[str, object]:
    """Every operation against reference.py, sizes of all protocols, odd alignments; two communicators, interleaved."""
    comms = [communicator(ranks)]
    ProcessDevice.lines = ranks.rank == 0  # one rank that cannot tell is enough for none to use lines
    with torch.device("meta"):  # the caller's default device is not ours
        comms.append(communicator(ranks))
    ProcessDevice.lines, ProcessDevice.hidden = True, (1,) if ranks.rank == 0 else ()
    comms.append(communicator(ranks))  # and so is one that does not see another's GPU
    ProcessDevice.hidden = ()
    assert [peer_of(comm).lines for comm in comms] == [True, False, False]
    comms.pop().close()
    generator = torch.Generator().manual_seed(7)
    world, checked = ranks.size, 0
    for step in range(24):
        comm = comms[step % 2]
        dtype = DTYPES[step % 3]
        n = (3, 700, 9001, 40000)[step % 4] * world
        shards = [torch.randn(n, generator=generator).to(dtype) for _ in range(world)]
        shards[0][:2] = -0.0
        x = misaligned(shards[ranks.rank], dtype.itemsize * (step % 5))
        got = comm.all_reduce(x, label="sum")
        pairs = [(got, reference.all_reduce(shards))]
        pairs.append((comm.reduce_scatter(x, label="part"), reference.reduce_scatter(shards, ranks.rank)))
        pairs.append((comm.all_gather(x, label="rows"), reference.all_gather(shards)))
        wide = [torch.randn(5, 8, generator=generator).to(dtype) for _ in range(world)]
        pairs.append((comm.all_gather(wide[ranks.rank], 1, label="wide"), reference.all_gather(wide, 1)))
        split = Split(8 * world - 3, (*(8,) * (world - 1), 5))
        uneven = [shard[:, : split.size(rank)].contiguous() for rank, shard in enumerate(wide)]
        got = comm.all_gather_columns(uneven[ranks.rank], split, label="columns")
        pairs.append((got, reference.all_gather_columns(uneven, split)))
        src = step % world
        sent = shards[ranks.rank].clone()
        pairs.append((comm.broadcast(sent, src, label="cast"), shards[src]))
        inplace = shards[ranks.rank].clone()
        pairs.append((comm.all_reduce(inplace, out=inplace, label="inplace"), reference.all_reduce(shards)))
        peer_of(comm).barrier()
        for a, b in pairs:
            assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)), (step, dtype, n)
            checked += 1
    big = [torch.full((150_001,), float(rank)) + torch.arange(150_001) for rank in range(world)]
    assert torch.equal(comms[1].all_gather(big[ranks.rank], label="bulk"), reference.all_gather(big))
    assert torch.equal(comms[1].all_reduce(big[ranks.rank], label="bulk"), reference.all_reduce(big))
    ints = comms[0].all_reduce(
        torch.ones(4, dtype=torch.int64), label="ints"
    )  # not a sum of this transport: falls back
    assert ints.tolist() == [world] * 4
    kernels = sorted({name for comm in comms for name in peer_of(comm)._device.launches})
    devices = [peer_of(comm)._device for comm in comms]
    for comm in comms:
        comm.close()
    return {"checked": checked, "kernels": kernels, "freed": [device.freed for device in devices]}


def withheld(ranks: Ranks) -> dict[str, object]:
    """Rank 1's host makes the call, its device does not run it: to the others, a missing graph replay."""
    comm = communicator(ranks, timeout_s=1.0)
    x = torch.ones(1000, dtype=torch.bfloat16)
    comm.all_reduce(x, label="warm")
    peer = peer_of(comm)
    if ranks.rank == 1:
        peer._device.skip = 1
    # The stand-in's clock is the process's CPU time, so that a busy machine does not shorten its bound.
    started = time.process_time()
    caught: CommError | None = None
    out = comm.all_reduce(x, label="layer.7.reduce")
    try:
        peer.check()
        if ranks.rank == 1:  # it is late: it learns of the verdict at its next call
            assert ranks.store is not None
            ranks.store.wait(["raised/0", "raised/2"])
            comm.all_reduce(x, out=out, label="layer.7.reduce")
            peer.check()
    except CommError as error:
        caught = error
    took = time.process_time() - started
    if ranks.store is not None:
        ranks.store.set(f"raised/{ranks.rank}", "")
    final = None
    try:
        comm.all_reduce(x, label="afterwards")
    except CommError as error:
        final = type(error).__name__
    dist.barrier()  # the process group still works
    return {
        "missing": caught.missing if isinstance(caught, RankTimeout) else None,
        "text": str(caught),
        "took": took,
        "final": final,
    }


def one_fails(ranks: Ranks, fault: str) -> dict[str, object]:
    if ranks.rank == 1:
        ProcessDevice.fault = fault
    started = time.monotonic()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        comm = communicator(ranks)
    took = time.monotonic() - started
    total = comm.all_reduce(torch.ones(3), label="after")
    return {
        "transports": sorted(comm.transports),
        "warnings": [str(w.message) for w in said if "peer" in str(w.message)],
        "took": took,
        "total": total.tolist(),
        "freed": [device.freed for device in ProcessDevice.made],
    }


def settings_differ(ranks: Ranks) -> dict[str, object]:
    os.environ["DSV41_PEER_MAX_MIB"] = "2" if ranks.rank else "4"
    return one_fails(ranks, "")


def table(ranks: Ranks) -> dict[str, object]:
    """A frozen table decides; what peer cannot carry goes to the fallback on every rank."""
    routes = (Route("all_reduce", 4096, "peer"), Route("all_gather", None, "peer"))
    comm = communicator(ranks, table=RouteTable("process_group", routes))
    small, large = torch.ones(64), torch.ones(8192)
    return {
        "small": comm.route_name("all_reduce", small, reduce_op="sum"),
        "large": comm.route_name("all_reduce", large, reduce_op="sum"),
        "max": comm.route_name("all_reduce", small, reduce_op="max"),
        "double": comm.route_name("all_reduce", small[:8].double(), reduce_op="sum"),
        "gather": comm.route_name("all_gather", large),
        "cast": comm.route_name("broadcast", large),
        "digest": comm.table.digest(),
    }


def calibration(ranks: Ranks) -> dict[str, object]:
    comm = communicator(ranks)
    made = calibrate(comm, sizes=(4096, 1024, 4096), repeats=1, label="calibrate")
    assert [nbytes for _, nbytes, _ in made.rows] == [1024, 4096] * 5
    path = Path(os.environ["DSV41_TEST_FOLDER"]) / "table.json"
    for _ in range(200):  # all ranks write the one file while the others read it
        loaded = Calibration.load(made.save(path) and path, comm)
    comm.barrier(label="saved")
    path = path.with_suffix(f".{ranks.rank}.json")
    made.save(path)
    text = json.loads(path.read_text())
    refusals = []
    for edit in ({"hardware": {**text["hardware"], "world": "4"}}, {"table": {**text["table"], "fallback": "mpi"}}):
        path.write_text(json.dumps(text | edit))
        try:
            Calibration.load(path, comm)
            refusals.append("")
        except ArgumentError as error:
            refusals.append(str(error))
    again = Communicator.create(ranks, ["peer"], loaded.table, CommSettings(timeout_s=20.0))
    total = again.all_reduce(torch.ones(8), label="under the table")
    assert total.tolist() == [float(ranks.size)] * 8
    return {
        "digest": made.table.digest(),
        "loaded": loaded.table.digest(),
        "routes": made.table.as_json(),
        "measured": [sorted(times) for _, _, times in made.rows],
        "other_world": refusals[0],
        "edited": refusals[1],
    }


SCENARIOS = {
    "calibrate": calibration,
    "collectives": collectives,
    "withheld": withheld,
    "allocate": lambda ranks: one_fails(ranks, "allocate"),
    "open": lambda ranks: one_fails(ranks, "open"),
    "settings_differ": settings_differ,
    "table": table,
}


if __name__ == "__main__":
    main("peer", HostPeerTransport, SCENARIOS)
