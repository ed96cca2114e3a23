"""Time every sensible plan of the peer kernels at each size and check its bytes: what kernels/peer_plan.py rests on.

PYTHONPATH=. torchrun --nproc-per-node N benchmarks/peer_tune.py OUT.json [seconds]
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial

import torch
import torch.distributed as dist
from peer_common import agree_wrong, capture, replay_times, slowest, start, wrong_bytes

from dsv41_dist.cli.environment import environment
from dsv41_dist.comm import reference
from dsv41_dist.comm.settings import CommSettings
from dsv41_dist.kernels import peer as kernels
from dsv41_dist.kernels.peer_plan import Plan, bulk_plan, fits, small_plan

SIZES = [1 << 10, 4 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10, 512 << 10]
SIZES += [1 << 20, 2 << 20, 4 << 20, 8 << 20, 16 << 20, 64 << 20]


def candidates(op: str, world: int, nbytes: int, chunks: int) -> Iterator[Plan]:
    size = nbytes // world if op == "reduce_scatter" else nbytes
    if size <= 128 << 10:
        for blocks, block in ((128, 128), (128, 256), (128, 512), (32, 512), (64, 1024), (128, 1024)):
            yield small_plan("packet", size, blocks, block)
    if size <= 8 << 20:
        for blocks, block in ((128, 128), (128, 256), (128, 512), (32, 512), (64, 1024), (128, 1024)):
            yield small_plan("line", size, blocks, block)
    if 64 << 10 <= size <= 8 << 20:
        for blocks, block, senders in itertools.product((64, 128, 256), (256, 512, 1024), (0.25, 0.4, 0.5)):
            if blocks * block <= 128 << 10:
                yield small_plan("line", size, blocks, block, int(blocks * senders))
    if op == "all_reduce" and world > 2 and nbytes >= 128 << 10:
        part = nbytes // world
        for blocks, block in ((128, 256), (128, 512), (128, 1024)):
            yield small_plan("line", part, blocks, block, two_shot=True)
        for blocks, block in ((128, 512), (256, 256), (256, 512)):
            yield small_plan("line", part, blocks, block, blocks * 2 // 5, two_shot=True)
    if nbytes >= 256 << 10:
        large = nbytes >= 8 << 20
        shots = (False, True) if op == "all_reduce" and (world > 2 or large) else (False,)
        chunk_sizes = (16, 32, 64, 128) if large else (8, 16, 32)
        grids = ((132, 1024), (128, 512), (264, 512), (256, 256), (528, 256))
        shares = (0.35, 0.5, 0.65) if large else (0.5,)
        for two, chunk, (blocks, block), share in itertools.product(shots, chunk_sizes, grids, shares):
            yield bulk_plan(op, world, nbytes, chunk << 10, blocks, chunks, two_shot=two, block=block, share=share)


def main() -> None:
    out_path, budget = sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else 200.0
    ranks, comm = start()
    peer = comm.transports["peer"]
    group, layout = peer._group, peer.layout
    world, rank = ranks.size, ranks.rank
    began, results = time.monotonic(), []
    jobs = [
        (op, n)
        for n in SIZES
        for op in ("all_gather", "all_reduce", "reduce_scatter")
        if n >= 1 << 20 or op != "reduce_scatter"
    ]
    for at, (op, nbytes) in enumerate(jobs):
        shards = []
        for r in range(world):
            torch.manual_seed(r + nbytes)
            shards.append(torch.randn(nbytes // 2, device="cuda", dtype=torch.bfloat16))
        x = shards[rank].clone()
        want = reference.all_gather(shards) if op == "all_gather" else reference.all_reduce(shards)
        if op == "reduce_scatter":
            want = want.chunk(world)[rank].clone()
        out = torch.empty_like(want)
        columns = kernels.Columns.equal(x.shape, 0, 2, world)
        plans = list(dict.fromkeys(candidates(op, world, nbytes, layout.chunks)))
        allowed = began + budget * (at + 1) / len(jobs)
        for index, plan in enumerate(plans):
            if not fits(plan, op, world, nbytes, layout.packet_bytes, layout.line_bytes, layout.bulk_bytes):
                continue
            late = torch.tensor([time.monotonic() > allowed], device="cuda", dtype=torch.int32)
            dist.all_reduce(late)
            if int(late) and index % 3:
                continue

            if op == "all_gather":
                call = partial(kernels.copy_columns, group, x, out, columns, plan, 5.0)
            else:
                call = partial(kernels.sum_parts, group, x, out, plan, 5.0, scatter=op == "reduce_scatter")
            out.fill_(7)
            graph = capture(call)
            times, _ = slowest(replay_times(graph, 9))
            torch.cuda.synchronize()
            peer.check()
            wrong = agree_wrong(wrong_bytes(out, want))
            results.append({"op": op, "bytes": nbytes, "us": sorted(times)[4], "wrong": wrong, **asdict(plan)})
        if rank == 0:
            best = sorted((r for r in results if r["op"] == op and r["bytes"] == nbytes), key=lambda r: r["us"])
            bad = sum(r["wrong"] > 0 for r in best)
            seen = set()
            for r in best:
                key = (r["protocol"], r["two_shot"])
                if key not in seen:
                    seen.add(key)
                    extra = f"chunk {r['chunk'] >> 10}K roles {r['roles']}" if r["protocol"] == "bulk" else ""
                    print(
                        f"{op} {nbytes >> 10}K {r['us']:.2f} {r['protocol']} two={r['two_shot']:d} "
                        f"{r['grid']}x{r['block']} {extra}",
                        flush=True,
                    )
            print(f"  {len(best)} plans, wrong {bad}", flush=True)
    if rank == 0:
        with open(out_path, "w") as file:
            block = environment(world, "torchrun", "cuda", CommSettings())
            json.dump({"env": block, "world": world, "results": results}, file)
    comm.close()
    dist.destroy_process_group()


main()
