"""One rank of roce_fabric.py: python -m tests.gpu.roce_rank SCENARIO,.. (RANK, WORLD_SIZE, MASTER_*). Prints one JSON
line. Nothing of the `roce` transport or of b12x is replaced: runtime, kernels and proxy are the published wheel's."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from dsv41_dist.comm import reference
from dsv41_dist.comm.communicator import Communicator
from dsv41_dist.comm.errors import RankTimeout
from dsv41_dist.comm.layout import Split
from dsv41_dist.comm.ranks import Ranks
from dsv41_dist.comm.settings import CommSettings

from .absent import install
from .peer_rank import DTYPES, same, values

SIZES = (8, 24, 1000, 24_576, 24_577, 262_144, 524_288)  # elements; not all are whole packs of 16 bytes


def communicator(ranks: Ranks, *names: str, timeout_s: float = 60.0) -> Communicator:
    comm = Communicator.create(ranks, list(names), None, CommSettings(timeout_s=timeout_s))
    missing = [name for name in names if name not in comm.transports]
    if missing:
        raise RuntimeError(f"{missing} could not be connected (see the warning above)")
    return comm


def shards_of(n: int, dtype: torch.dtype, world: int, seed: int) -> list[torch.Tensor]:
    return [values(n, dtype, rank, seed) for rank in range(world)]


def bits(ranks: Ranks, _: dict) -> dict[str, Any]:
    """Sums and copies against reference.py, eager; and the peer transport's sums are the same bits."""
    roce, peer = communicator(ranks, "roce"), communicator(ranks, "peer")
    runtime = roce.transports["roce"]._runtime  # pyright: ignore[reportAttributeAccessIssue]
    world, rank, sums, copies = ranks.size, ranks.rank, 0, 0
    for turn in range(6):
        for n in SIZES:
            for dtype in DTYPES:
                count = n // world * world
                if count * dtype.itemsize > 2 << 20:
                    continue
                shards = shards_of(count, dtype, world, 1000 * turn + n % 997)
                x, want = shards[rank], reference.all_reduce(shards)
                assert roce.route_name("all_reduce", x, reduce_op="sum") == "roce", (n, dtype)
                same(roce.all_reduce(x, label="sum"), want, ("roce", n, dtype))
                same(peer.all_reduce(x, label="sum"), want, ("peer", n, dtype))
                same(roce.reduce_scatter(x, label="part"), reference.reduce_scatter(shards, rank), ("part", n, dtype))
                sums += 2
                for dim, shape in ((0, (count,)), (1, (2, count // 2)), (1, (count // 2, 2))):
                    wide = [s[: shape[0] * (shape[1] if len(shape) > 1 else 1)].view(shape) for s in shards]
                    if dim:
                        got, want_rows = roce.all_gather(wide[rank], 1, label="wide"), reference.all_gather(wide, 1)
                    else:
                        got, want_rows = roce.all_gather(wide[rank], label="rows"), reference.all_gather(wide)
                    same(got, want_rows, ("gather", shape, dtype))
                    copies += 1
    split = Split(448 * world - 128, (*(448,) * (world - 1), 320))
    whole = [values(96 * split.n, torch.bfloat16, 0, seed).view(96, split.n) for seed in range(4)]
    for one in whole:
        mine = one[:, split.start(rank) : split.start(rank) + split.size(rank)].contiguous()
        same(roce.all_gather_columns(mine, split, label="columns"), one, "columns")
        copies += 1
    roce.check()
    out = {"sums": sums, "copies": copies, "runtime": type(runtime).__module__, "stats": str(runtime.stats())[:600]}
    roce.close(), peer.close()
    return out


def graphs(ranks: Ranks, _: dict) -> dict[str, Any]:
    """A captured step replayed 200 times with changing inputs, eager calls between."""
    comm = communicator(ranks, "roce")
    world, rank = ranks.size, ranks.rank
    sizes = (96, 4096, 40_000, 300_000)
    statics = [torch.zeros(n // world * world, dtype=DTYPES[i % 3], device="cuda") for i, n in enumerate(sizes)]
    results: list[tuple[torch.Tensor, torch.Tensor]] = []

    def step() -> None:
        results[:] = [(comm.all_reduce(x, label="sum"), comm.all_gather(x, label="rows")) for x in statics]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        step()
    for turn in range(200):
        shards = [shards_of(x.numel(), x.dtype, world, 100 * turn + i) for i, x in enumerate(statics)]
        for x, mine in zip(statics, shards, strict=True):
            x.copy_(mine[rank])
        graph.replay()
        for i, (total, rows) in enumerate(results):
            same(total, reference.all_reduce(shards[i]), (turn, i, "sum"))
            same(rows, reference.all_gather(shards[i]), (turn, i, "rows"))
        comm.check()
        if turn % 8 == 0:
            same(comm.all_reduce(shards[1][rank], label="eager"), reference.all_reduce(shards[1]), (turn, "eager"))
    comm.close()
    return {"replays": 200, "collectives": 200 * 2 * len(statics)}


def times(ranks: Ranks, _: dict) -> dict[str, Any]:
    """us per all-reduce in a graph of 20, slowest rank: of this stand-in fabric, so no figure of RoCE."""
    comm, out = communicator(ranks, "roce"), {}
    for nbytes in (1024, 16384, 49152, 262144, 1 << 20):
        x = torch.zeros(nbytes // 2, dtype=torch.bfloat16, device="cuda")
        comm.all_reduce(x, out=x, label="warm")
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(20):
                comm.all_reduce(x, out=x, label="sum")
        graph.replay()
        torch.cuda.synchronize()
        dist.barrier()
        started = time.perf_counter()
        for _ in range(10):
            graph.replay()
        torch.cuda.synchronize()
        out[nbytes] = round((time.perf_counter() - started) / 200 * 1e6, 1)
        comm.check()
    comm.close()
    return out


def lost(ranks: Ranks, _: dict) -> dict[str, Any]:
    """Rank 1's writes are lost after the first calls: every rank ends in RankTimeout, bounded, and stays ended."""
    comm = communicator(ranks, "roce", timeout_s=5.0)
    x = torch.ones(1000, dtype=torch.bfloat16, device="cuda")
    for _ in range(3):
        comm.all_reduce(x, label="sum")
    comm.synchronize(label="before")
    if ranks.rank == 1:
        os.environ["SIM_DROP_FROM"] = "1"
    started, said = time.monotonic(), "nothing"
    try:
        for _ in range(2):
            comm.all_reduce(x, label="lost")
            comm.synchronize(label="lost")
            comm.check()
    except RankTimeout as error:
        said = f"{type(error).__name__}: {error}"
    took = time.monotonic() - started
    assert said != "nothing", "no rank may get past a lost write"
    again = "nothing"
    try:
        comm.all_reduce(x, label="after")
    except Exception as error:
        again = type(error).__name__
    assert again != "nothing", "a poisoned transport must refuse"
    closing = time.monotonic()
    comm.close()
    return {
        "said": said[:600],
        "took_s": round(took, 2),
        "again": again,
        "close_s": round(time.monotonic() - closing, 2),
    }


def engine(ranks: Ranks, group_of: dict) -> dict[str, Any]:
    """roce_gather on the engine's own TP group on GPUs: bytes equal to the stock functions, eager and captured."""
    from sglang.srt.distributed import parallel_state
    from sglang.srt.managers import scheduler  # noqa: F401  (a patched module: it must import)
    from sglang.srt.model_executor.model_runner import ModelRunner

    from dsv41_dist.engine import boot

    group, coordinator = group_of["tp"], parallel_state.GroupCoordinator
    with contextlib.suppress(AttributeError):  # the rest of it wants a model
        ModelRunner.load_model(SimpleNamespace())
    closure = dict(zip(coordinator.destroy.__code__.co_freevars, coordinator.destroy.__closure__, strict=True))
    adapter = closure["self"].cell_contents
    assert adapter.comm is not None, adapter.state.notes

    def stock(x: torch.Tensor, dim: int) -> torch.Tensor:
        """The same call, as the engine does it when nothing is routed."""
        limit, adapter.limits["all_gather"] = adapter.limits["all_gather"], 0
        try:
            return group.all_gather(x, dim=dim)
        finally:
            adapter.limits["all_gather"] = limit

    done = 0
    shapes = ((1, 16), (6, 40), (5, 7), (3, 2, 9), (129,), (6, 1280), (6, 32320))
    dtypes = (torch.bfloat16, torch.float32, torch.float16, torch.int32, torch.int64, torch.uint8)
    for dtype in dtypes:
        for seed, shape in enumerate(shapes):
            numbers = values(torch.Size(shape).numel(), torch.float32, ranks.rank, seed)
            x = numbers.nan_to_num(1, 2, 3).clamp(0, 200).to(dtype).view(shape)
            for dim in range(-len(shape), len(shape)):
                same(group.all_gather(x, dim=dim), stock(x, dim), (dtype, shape, dim))
                done += 1
    wide = torch.zeros(6, 32320, dtype=torch.bfloat16, device="cuda")
    rows = torch.zeros(6, 1280, dtype=torch.bfloat16, device="cuda")
    stock_group, replays = {}, 50
    with parallel_state.graph_capture() as context, torch.cuda.stream(context.stream):
        group.all_gather(wide), group.all_gather(rows, dim=0)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=context.stream):
            got = [group.all_gather(wide, dim=-1), group.all_gather(rows, dim=0)]
        pynccl = group.pynccl_comm
        stock_group["pynccl"] = pynccl is not None and pynccl.available
    for turn in range(replays):
        wide.copy_(values(wide.numel(), wide.dtype, ranks.rank, turn).view_as(wide))
        rows.copy_(values(rows.numel(), rows.dtype, ranks.rank, turn + 1).view_as(rows))
        graph.replay()
        torch.cuda.synchronize()
        same(got[0], stock(wide, -1), ("replay", turn, "wide"))
        same(got[1], stock(rows, 0), ("replay", turn, "rows"))
        adapter.comm.check()
    counts = {f"{op}: {way}": calls for (op, way), (calls, _) in adapter.counts.items()}
    assert counts.get("all_gather: roce", 0) >= done, counts
    entry = boot.report()["adapters"][0]
    return {
        "eager": done,
        "replays": replays,
        "counts": counts,
        "state": entry["state"],
        "notes": entry["notes"],
        **stock_group,
    }


def join(with_engine: bool) -> dict[str, Any]:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank)
    if not with_engine:
        dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
        return {}
    install()
    os.environ.setdefault("SGLANG_ENABLE_JIT_DEEPGEMM", "0")
    from sglang.srt.distributed import parallel_state
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    arguments = {"model_path": "dummy", "tp_size": world, "device": "cuda", "disable_custom_all_reduce": True}
    publish(ServerArgs(**arguments), role="test", ranks=SpawnRanks(world_rank=rank, gpu_id=rank))
    parallel_state.init_distributed_environment(
        world_size=world, rank=rank, local_rank=rank, backend="nccl", distributed_init_method="env://", timeout=120
    )
    parallel_state.initialize_model_parallel(backend="nccl")
    return {"tp": parallel_state.get_tp_group()}


def main() -> None:
    names = sys.argv[1].split(",")
    out: dict[str, Any] = {}
    code = 0
    try:
        groups = join("engine" in names)
        ranks = Ranks.from_object(groups["tp"]) if groups else Ranks.from_torch()
        for name in names:
            started = time.monotonic()
            out[name] = globals()[name](ranks, groups)
            out[name]["seconds"] = round(time.monotonic() - started, 1)
    except BaseException as error:
        traceback.print_exc()
        out["error"], code = f"{type(error).__name__}: {error}"[:3000], 1
    print(json.dumps(out), flush=True)
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
