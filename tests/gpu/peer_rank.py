"""One rank of test_peer_gpu: torchrun --nproc-per-node N -m tests.gpu.peer_rank SCENARIO... Exit code 1 on a failure.

With more ranks than GPUs they share them, and only what needs no NCCL runs: the transport is connected over gloo.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from dsv41_dist.comm import reference
from dsv41_dist.comm.communicator import Communicator
from dsv41_dist.comm.errors import CommError, RankTimeout
from dsv41_dist.comm.layout import Split
from dsv41_dist.comm.ranks import Ranks
from dsv41_dist.comm.settings import CommSettings
from dsv41_dist.comm.transports.peer import PeerTransport
from dsv41_dist.comm.watch import Watch
from dsv41_dist.kernels import peer as kernels
from dsv41_dist.kernels.peer_plan import Plan, bulk_plan, fits, small_plan

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def connect(ranks: Ranks, timeout_s: float = 20.0) -> PeerTransport:
    """A transport of its own, without a communicator."""
    watch = Watch(ranks, CommSettings(timeout_s=timeout_s))
    watch.started()
    peer = PeerTransport(ranks, watch)
    blobs: list[bytes] = [b""] * ranks.size
    dist.all_gather_object(blobs, peer.allocate(), group=ranks.cpu_group)
    peer.attach(blobs)
    dist.barrier(group=ranks.cpu_group)
    return peer


def same(got: torch.Tensor, want: torch.Tensor, what: object) -> None:
    a, b = (t.contiguous().view(-1).view(torch.uint8) for t in (got, want))
    if not torch.equal(a, b):
        at = (a != b).nonzero().flatten()
        raise AssertionError(f"{what}: {len(at)} bytes differ, first at {at[:4].tolist()} of {a.numel()}")


def held(x: torch.Tensor, by: int) -> torch.Tensor:
    """x at `by` bytes past a multiple of 256."""
    raw = torch.empty(x.nbytes + 512, dtype=torch.uint8, device=x.device)
    raw = raw[-raw.data_ptr() % 256 + by :][: x.nbytes]
    view = raw.view(x.dtype).view(x.shape)
    return view.copy_(x)


def values(n: int, dtype: torch.dtype, rank: int, seed: int) -> torch.Tensor:
    """Normal numbers, with -0.0, infinities, NaN, subnormals and large ones sprinkled in."""
    generator = torch.Generator("cuda").manual_seed(seed * 64 + rank)
    x = torch.randn(n, device="cuda", generator=generator)
    odd = torch.tensor([-0.0, float("inf"), -float("inf"), float("nan"), 1e-40, 6e4, -6e4, 3e38], device="cuda")
    pick = torch.randint(0, 256, (n,), device="cuda", generator=generator)
    x = torch.where(pick < 8, odd[pick.clamp(max=7)], x)
    x[: n // 8] = -0.0
    return x.to(dtype)


def draw_plan(rng: random.Random, op: str, world: int, nbytes: int, layout: kernels.Layout, lines: bool) -> Plan:
    size = -(-nbytes // world) if op == "reduce_scatter" else nbytes
    names = ["bulk"] + ["packet"] * (size <= layout.packet_bytes) + ["line"] * (lines and size <= layout.line_bytes)
    protocol = rng.choice(names)
    if protocol != "bulk":
        blocks = rng.choice([2, 8, 32, 64])
        if op == "all_reduce" and protocol == "line" and nbytes % (16 * world) == 0 and rng.random() < 0.5:
            return small_plan(protocol, nbytes // world, blocks, 256, two_shot=True)
        return small_plan(protocol, size, blocks, rng.choice([64, 256, 1024]), senders=rng.choice([0, 1, blocks // 2]))
    two = op == "all_reduce" and rng.random() < 0.6
    plan = bulk_plan(op, world, nbytes, rng.choice([1, 4, 16]) << 10, rng.choice([8, 64, 132]), layout.chunks,
                     two_shot=two, block=rng.choice([128, 512]))  # fmt: skip
    room = (layout.packet_bytes, layout.line_bytes, layout.bulk_bytes)
    return (
        plan
        if fits(plan, op, world, nbytes, *room)
        else bulk_plan(op, world, nbytes, 4096, 64, layout.chunks, two_shot=True)
    )


def one_sum(peer: PeerTransport, rng: random.Random, seed: int, most: int) -> None:
    world, rank, group = peer.ranks.size, peer.ranks.rank, peer._ready()
    dtype, scatter = rng.choice(DTYPES), rng.random() < 0.3
    n = int(2 ** rng.uniform(0, most)) // dtype.itemsize + 1
    n = n * world if scatter and n * world < 1 << most else n // world * world + world if scatter else n
    by, by_out = (dtype.itemsize * rng.randrange(9) for _ in range(2))
    shards = [values(n, dtype, r, seed) for r in range(world)]
    x = held(shards[rank], by)
    want = reference.reduce_scatter(shards, rank) if scatter else reference.all_reduce(shards)
    out = x if not scatter and rng.random() < 0.3 else held(torch.full_like(want, 7), by_out)
    plan = draw_plan(rng, "reduce_scatter" if scatter else "all_reduce", world, x.nbytes, peer.layout, peer.lines)
    kernels.sum_parts(group, x, out, plan, 30.0, scatter=scatter)
    same(out, want, (seed, dtype, n, scatter, plan))


def one_copy(peer: PeerTransport, rng: random.Random, seed: int, most: int) -> None:
    world, rank, group = peer.ranks.size, peer.ranks.rank, peer._ready()
    item, rows = rng.choice([1, 2, 4, 16]), rng.choice([1, 1, 3, 48])
    width = max(1, int(2 ** rng.uniform(0, most)) // rows // item)
    kind, src = rng.choice(["equal", "uneven", "broadcast"]), rng.randrange(world)
    widths = [width * item] * world
    if kind == "uneven":
        widths = [rng.randrange(0, width + 1) * item for _ in range(world)]
    elif kind == "broadcast":
        rows, widths = 1, [width if r == src else 0 for r in range(world)]
    starts = tuple(sum(widths[:r]) for r in range(world))
    columns = kernels.Columns(rows, tuple(widths), starts, sum(widths))
    generator = torch.Generator("cuda").manual_seed(seed)
    want = torch.randint(0, 256, (rows, sum(widths)), dtype=torch.uint8, device="cuda", generator=generator)
    x = held(want[:, starts[rank] : starts[rank] + widths[rank]].contiguous(), rng.randrange(17))
    out = held(torch.full_like(want, 7), rng.randrange(17))
    plan = draw_plan(rng, "all_gather", world, columns.largest, peer.layout, peer.lines)
    kernels.copy_columns(group, x, out, columns, plan, 30.0)
    same(out, want, (seed, kind, rows, widths, plan))


def bits(ranks: Ranks, count: int = 1000, most: int = 21) -> None:
    """`count` random sums and copies: sizes to 2^most bytes, alignments, dtypes, plans, in place; byte-equal."""
    peer = connect(ranks)
    rng = random.Random(5)
    for seed in range(count):
        one_sum(peer, rng, seed, most)
        one_copy(peer, rng, seed, most)
        if seed % 50 == 0:
            kernels.barrier(peer._ready(), 30.0)
    torch.cuda.synchronize()
    peer.check()
    peer.close()
    say(ranks, f"{count} random sums and {count} random copies byte-equal at world {ranks.size}, lines {peer.lines}")


def shared(ranks: Ranks) -> None:
    """Ranks that share GPUs take turns on them: each wait may last a time slice, so fewer and smaller calls."""
    bits(ranks, 60, 16)


def graphs(ranks: Ranks) -> None:
    """Replays with changing inputs, eager calls between them, two communicators, through the public interface."""
    comms = [Communicator.create(ranks, ["peer"], None, CommSettings(timeout_s=20.0)) for _ in range(2)]
    world, rank = ranks.size, ranks.rank
    sizes = [96, 4096, 40_000, 300_000, 2_000_000]
    statics = [torch.zeros(n // world * world, dtype=DTYPES[i % 3], device="cuda") for i, n in enumerate(sizes)]
    split = Split(8 * world - 3, (*(8,) * (world - 1), 5))
    wide = torch.zeros(64, split.size(rank), dtype=torch.bfloat16, device="cuda")
    results: list[list[torch.Tensor]] = []

    def step() -> None:
        results.clear()
        for i, x in enumerate(statics):
            comm = comms[i % 2]
            found = [comm.all_reduce(x, label="sum"), comm.all_gather(x, label="rows")]
            found += [comm.reduce_scatter(x, label="part"), comm.broadcast(x.clone(), i % world, label="cast")]
            results.append(found)
        results.append([comms[0].all_gather_columns(wide, split, label="columns")])

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        step()
    for turn in range(40):
        shards = [[values(x.numel(), x.dtype, r, 100 * turn + i) for r in range(world)] for i, x in enumerate(statics)]
        whole = values(64 * split.n, torch.bfloat16, 0, turn).view(64, split.n)
        for x, mine in zip(statics, shards, strict=True):
            x.copy_(mine[rank])
        wide.copy_(whole[:, split.start(rank) : split.start(rank) + split.size(rank)])
        graph.replay()
        for i, found in enumerate(results[:-1]):
            same(found[0], reference.all_reduce(shards[i]), (turn, i, "sum"))
            same(found[1], reference.all_gather(shards[i]), (turn, i, "rows"))
            same(found[2], reference.reduce_scatter(shards[i], rank), (turn, i, "part"))
            same(found[3], shards[i][i % world], (turn, i, "cast"))
        same(results[-1][0], whole, (turn, "columns"))
        eager = comms[turn % 2].all_reduce(shards[1][rank], label="eager")
        same(eager, reference.all_reduce(shards[1]), (turn, "eager"))
    for comm in comms:
        comm.synchronize(label="end")
        comm.close()
    say(ranks, "40 replays with changing inputs, eager calls between, two communicators: byte-equal")


def withheld(ranks: Ranks) -> None:
    """Rank 1 does not replay once: the others name it within the bound and a second; the process group still works."""
    bound = 2.0
    comm = Communicator.create(ranks, ["peer"], None, CommSettings(timeout_s=bound))
    x = torch.ones(4096, dtype=torch.bfloat16, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        out = comm.all_reduce(x, label="layer.7.reduce")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        out = comm.all_reduce(x, label="layer.7.reduce")
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    same(out, torch.full_like(x, ranks.size), "before")
    dist.barrier(group=ranks.cpu_group)
    started, caught = time.monotonic(), None
    if ranks.rank != 1:
        graph.replay()
        while caught is None and time.monotonic() < started + 10:
            try:
                comm.check()  # reads host memory: the kernel is still waiting
                time.sleep(0.01)
            except CommError as error:
                caught = error
        took = time.monotonic() - started
        assert isinstance(caught, RankTimeout), repr(caught)
        assert caught.missing == [1], caught
        assert bound - 0.1 <= took <= bound + 1.0, took
        if ranks.rank == 0:
            say(ranks, f"withheld replay: named after {took:.2f} s with a bound of {bound} s: {caught}")
    else:
        time.sleep(bound + 1.5)
        graph.replay()  # too late: it ends at once
        torch.cuda.synchronize()
        assert comm.transports["peer"]._device.poisoned()
        with pytest.raises(RankTimeout, match="rank 1") as late:
            comm.check()
        assert late.value.missing == [1]
    said: list[object] = [None] * ranks.size
    dist.all_gather_object(said, ranks.rank, group=ranks.cpu_group)
    assert said == list(range(ranks.size))
    comm.close()


def streams(ranks: Ranks) -> None:
    """Eager calls may change streams; one capture on two streams is refused."""
    peer = connect(ranks)
    x = torch.ones(100_000, device="cuda")
    out = torch.empty_like(x)
    others = [torch.cuda.Stream() for _ in range(3)]
    for turn in range(60):
        others[turn % 3].wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(others[turn % 3]):
            peer.all_reduce(x, "sum", out)
    torch.cuda.synchronize()
    same(out, torch.full_like(x, ranks.size), "streams")
    graph, refused = torch.cuda.CUDAGraph(), ""
    with torch.cuda.graph(graph, stream=others[0]):
        peer.all_reduce(x, "sum", out)
        others[1].wait_stream(others[0])
        with torch.cuda.stream(others[1]):
            try:
                peer.all_reduce(x, "sum", out)
            except RuntimeError as error:
                refused = str(error)
        others[0].wait_stream(others[1])
    assert "within a capture all its calls belong on one stream" in refused
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    same(out, torch.full_like(x, ranks.size), "after the refusal")
    peer.close()
    say(ranks, "streams: eager calls follow each other over three streams; two streams in one capture are refused")


def soak(ranks: Ranks, total: int = 1_000_000) -> None:
    """A million mixed collectives in graph replays; the results, the count and the memory at the end."""
    peer = connect(ranks)
    world, rank = ranks.size, ranks.rank
    xs = [torch.full((n,), float(rank + 1), dtype=torch.bfloat16, device="cuda") for n in (512, 4096, 32768, 300_000)]
    outs = [torch.empty_like(x) for x in xs]
    wides = [torch.empty(world * x.numel(), dtype=x.dtype, device="cuda") for x in xs[:3]]
    first = 2**32 - 1000  # on the way it passes 2^32
    for kind in (0, 1):
        peer._device.write_word(peer._arena + peer.layout.control(kind), first)
    dist.barrier(group=ranks.cpu_group)
    graph, per, launches = torch.cuda.CUDAGraph(), 0, 0
    side = torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=side):
        for turn in range(50):
            for i, x in enumerate(xs[: 4 if turn % 10 == 0 else 3]):
                peer.all_reduce(x, "sum", outs[i])
                # A sum of lines in two shots is a scatter and a gather, each with a number of its own.
                plan = peer.plan("all_reduce", x.nbytes)
                launches += 2 if plan.two_shot and plan.protocol == "line" else 1
                per += 1
                if i < 3:
                    peer.all_gather_rows(x, wides[i])
                    per, launches = per + 1, launches + 1
    graph.replay()  # the first one may take memory
    torch.cuda.synchronize()
    before, replays = torch.cuda.mem_get_info()[0], -(-total // per)
    started = time.monotonic()
    for turn in range(1, replays):
        graph.replay()
        if turn % 200 == 0:
            torch.cuda.synchronize()
            peer.check()
    torch.cuda.synchronize()
    took = time.monotonic() - started
    grown = before - torch.cuda.mem_get_info()[0]  # before the checks below take memory of their own
    peer.check()
    for x, out in zip(xs, outs, strict=True):
        same(out, torch.full_like(x, world * (world + 1) / 2), "soak sum")
    for x, wide in zip(xs, wides, strict=False):
        parts = [torch.full_like(x, float(r + 1)) for r in range(world)]
        same(wide, torch.cat(parts), "soak gather")
    counts = [peer._device.read_word(peer._arena + peer.layout.control(kind)) - first for kind in (0, 1)]
    assert sum(counts) == replays * launches, (counts, replays * launches)
    assert grown <= 0, f"{grown} bytes of GPU memory grew"
    peer.close()
    say(ranks, f"soak: {replays * per} collectives in {took:.1f} s, past sequence 2^32, memory growth {grown} bytes")


def say(ranks: Ranks, text: str) -> None:
    if ranks.rank == 0:
        print(text, flush=True)


SCENARIOS: dict[str, Callable[[Ranks], None]] = {
    "bits": bits,
    "short": lambda ranks: bits(ranks, 25, 17),
    "shared": shared,
    "graphs": graphs,
    "withheld": withheld,
    "streams": streams,
    "soak": soak,
}


def main() -> None:
    world, local, gpus = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    device = torch.device("cuda", local % gpus)
    torch.cuda.set_device(device)
    if world > gpus:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("nccl", device_id=device)
    for name in sys.argv[1:]:
        # A communicator's failure is final for it, not for the group: each scenario makes its own.
        SCENARIOS[name](Ranks.from_torch(device=device))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
