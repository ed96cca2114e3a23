"""Every collective at every size, side by side in one run: NCCL, torch symmetric memory, peer. Bytes are checked.

PYTHONPATH=. torchrun --nproc-per-node N benchmarks/peer_bench.py OUT.json [eager]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm
from peer_common import agree_wrong, capture, eager_times, replay_times, row, start, wrong_bytes

from dsv41_dist.cli.environment import environment
from dsv41_dist.comm import reference
from dsv41_dist.comm.layout import TileSplit
from dsv41_dist.comm.settings import CommSettings

SIZES = [1 << power for power in range(10, 27)]
REPLAYS = 25


def inputs(world: int, shape: tuple[int, ...], seed: int) -> list[torch.Tensor]:
    shards = []
    for rank in range(world):
        torch.manual_seed(1000 * seed + rank)
        shards.append(torch.randn(shape, device="cuda", dtype=torch.bfloat16))
    return shards


class Bench:
    def __init__(self) -> None:
        self.ranks, self.comm = start()
        self.peer = self.comm.transports["peer"]
        self.world, self.rank = self.ranks.size, self.ranks.rank
        self.rows: list[dict[str, Any]] = []
        self.graph = "eager" not in sys.argv[2:]

    def time(
        self,
        op: str,
        x: torch.Tensor,
        transport: str,
        fn: Callable[[], Any],
        result: Callable[[], torch.Tensor],
        want: torch.Tensor | None,
        **more: Any,
    ) -> None:
        """want None: the transport sums in its own order, so its bits are not compared."""
        if self.graph:
            graph = capture(fn)
            times = replay_times(graph, REPLAYS)
        else:
            times = eager_times(fn, REPLAYS)
        torch.cuda.synchronize()
        self.peer.check()
        wrong = agree_wrong(0 if want is None else wrong_bytes(result(), want))
        self.rows.append(row(op, x, transport, self.graph, times, wrong, **more))
        if self.rank == 0:
            last = self.rows[-1]
            print(
                f"{op:19} {last['bytes']:>9} {transport:16} {last['p50_us']:9.2f} us {last['busbw_gbps']:7.1f} GB/s "
                f"wrong {wrong}",
                flush=True,
            )

    def gather(self, nbytes: int) -> None:
        shards = inputs(self.world, (nbytes // 2,), nbytes)
        x, want = shards[self.rank].clone(), reference.all_gather(shards)
        out = torch.zeros_like(want)
        self.time("all_gather", x, "nccl", partial(dist.all_gather_into_tensor, out, x), lambda: out, want)
        out.zero_()
        self.time("all_gather", x, "peer", partial(self.peer.all_gather_rows, x, out), lambda: out, want)

    def reduce(self, nbytes: int) -> None:
        shards = inputs(self.world, (nbytes // 2,), nbytes)
        x, want = shards[self.rank].clone(), reference.all_reduce(shards)
        work, out = x.clone(), torch.zeros_like(x)
        self.time("all_reduce", x, "nccl", partial(dist.all_reduce, work), lambda: work, None)
        self.time("all_reduce", x, "peer", partial(self.peer.all_reduce, x, "sum", out), lambda: out, want)
        self.symm_reduce(x)

    def symm_reduce(self, x: torch.Tensor) -> None:
        name = dist.group.WORLD.group_name
        buffer = symm.empty(x.numel(), dtype=x.dtype, device="cuda")
        symm.rendezvous(buffer, name)
        buffer.copy_(x)
        ops = torch.ops.symm_mem
        self.time(
            "all_reduce", x, "torch_one_shot", partial(ops.one_shot_all_reduce, buffer, "sum", name), lambda: x, None
        )
        self.time(
            "all_reduce", x, "torch_two_shot", partial(ops.two_shot_all_reduce_, buffer, "sum", name), lambda: x, None
        )

    def scatter(self, nbytes: int) -> None:
        shards = inputs(self.world, (self.world, nbytes // 2 // self.world), nbytes)
        x, want = shards[self.rank].clone(), reference.reduce_scatter(shards, self.rank)
        out = torch.zeros_like(want)
        self.time("reduce_scatter", x, "nccl", partial(dist.reduce_scatter_tensor, out, x), lambda: out, None)
        self.time("reduce_scatter", x, "peer", partial(self.peer.reduce_scatter, x, "sum", out), lambda: out, want)

    def columns(self, rows: int, tiles: int) -> None:
        """[rows, tiles of 128] over the ranks, the first ranks one tile more; against pad + gather + movedim + cat."""
        split = TileSplit(tiles * 128, 128, self.world)
        whole = inputs(1, (rows, split.n), rows)[0]
        start, size = split.start(self.rank), split.size(self.rank)
        x, out = whole[:, start : start + size].contiguous(), torch.zeros_like(whole)
        widest, sent = split.widest, rows * split.widest * 2

        def stock() -> torch.Tensor:
            padded = torch.nn.functional.pad(x, (0, widest - size))
            held = torch.empty(self.world, rows, widest, dtype=x.dtype, device="cuda")
            dist.all_gather_into_tensor(held, padded)
            held = held.movedim(0, 1)
            return torch.cat([held[:, rank, : split.size(rank)] for rank in range(self.world)], dim=-1)

        wanted: list[torch.Tensor] = [whole]
        self.time(
            "all_gather_columns",
            x,
            "nccl_pad_cat",
            lambda: wanted.__setitem__(0, stock()),
            lambda: wanted[0],
            whole,
            nbytes=sent,
            shape=[rows, split.n],
        )
        self.time(
            "all_gather_columns",
            x,
            "peer",
            partial(self.peer.all_gather_columns, x, split, out),
            lambda: out,
            whole,
            nbytes=sent,
            shape=[rows, split.n],
        )

    def broadcast(self, nbytes: int) -> None:
        shards = inputs(self.world, (nbytes // 2,), nbytes)
        x = shards[self.rank].clone()
        self.time("broadcast", x, "nccl", partial(dist.broadcast, x, 0), lambda: x, shards[0])
        x.copy_(shards[self.rank])
        self.time("broadcast", x, "peer", partial(self.peer.broadcast, x, 0), lambda: x, shards[0])


def main() -> None:
    bench = Bench()
    for nbytes in SIZES:
        bench.gather(nbytes)
        bench.reduce(nbytes)
        bench.scatter(nbytes)
        bench.broadcast(nbytes)
    for rows in (1, 6, 48, 96, 512, 2048, 8192):
        bench.columns(rows, 14 if bench.world == 4 else 15)
    if bench.rank == 0:
        device = torch.cuda.get_device_name()
        block = environment(bench.world, "torchrun", "cuda", CommSettings())
        block["plan"] = "kernels/peer_plan.py"
        with open(sys.argv[1], "w") as file:
            json.dump({"env": block, "rows": bench.rows}, file, indent=1)
        print(f"world {bench.world} on {device}: {len(bench.rows)} rows, wrong {sum(r['wrong'] for r in bench.rows)}")
    bench.comm.close()
    dist.destroy_process_group()


main()
