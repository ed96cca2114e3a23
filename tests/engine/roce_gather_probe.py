"""One rank of test_roce_gather.py, in the engine's Python: the real GroupCoordinator over gloo, with the adapter armed
and a stand-in under the `roce` transport. Prints one JSON line: what differed from stock, and the report."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from types import SimpleNamespace

import torch
from prometheus_client import REGISTRY
from sglang.srt.distributed import parallel_state
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import ServerArgs

from dsv41_dist.comm import create, reference
from dsv41_dist.comm import transports as registry
from dsv41_dist.engine import boot
from tests.unit.roce.stand_in import Faults, HostRoceTransport

DTYPES = (torch.bfloat16, torch.float32, torch.float16, torch.int32, torch.int64, torch.uint8)
SHAPES = ((1, 16), (6, 40), (5, 7), (3, 2, 9), (2, 3, 4, 8), (129,), (1, 1))


def stand_in() -> None:
    original = registry.transport_class
    create.transport_class = lambda name: HostRoceTransport if name == "roce" else original(name)
    Faults.wait_s = 20.0


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.shape == b.shape
        and a.dtype == b.dtype
        and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
    )


def shard(shape, dtype, rank: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype.is_floating_point:
        x = torch.randn(shape, generator=generator).to(dtype)
        x.view(-1)[0] = float("nan")
        return x
    return torch.randint(0, 200, shape, generator=generator).to(dtype)


def gathers(group, coordinator) -> tuple[list, int]:
    """Every dtype, shape and dimension against the stock functions of the same group."""
    wrong, done = [], 0
    for seed, (dtype, shape) in enumerate((d, s) for d in DTYPES for s in SHAPES):
        x = shard(shape, dtype, group.rank_in_group, seed)
        for dim in range(-len(shape), len(shape)):
            got = group.all_gather(x, dim=dim)
            want = coordinator.all_gather.__wrapped__(group, x, dim)
            done += 1
            if not same(got, want) or got.is_contiguous() != want.is_contiguous():
                wrong.append(f"all_gather {dtype} {shape} {dim}")
        want = torch.empty((group.world_size * shape[0], *shape[1:]), dtype=dtype)
        coordinator._all_gather_into_tensor.__wrapped__(group, want, x)
        for out_shape in (want.shape, (want.numel(),)):  # NCCL takes a flat output too, gloo does not
            got = torch.empty(out_shape, dtype=dtype)
            group._all_gather_into_tensor(got, x)
            done += 1
            if not same(got, want.view(out_shape)):
                wrong.append(f"_all_gather_into_tensor {dtype} {shape} {out_shape}")
    return wrong, done


def left_to_the_engine(group, coordinator) -> list:
    """Calls that must not be routed; what the engine makes of them is still the engine's."""
    wrong, size = [], group.world_size
    rank = group.rank_in_group
    large = torch.full((4097,), float(rank))
    for x in (torch.tensor([[True, rank % 2 == 0]]), large, torch.full((2, 2), complex(rank, 1))):
        stock = coordinator.all_gather.__wrapped__(group, x, -1)
        if not same(group.all_gather(x), stock):
            wrong.append(str(x.dtype))
    said = []
    for call in (group.all_gather, lambda x: coordinator.all_gather.__wrapped__(group, x, -1)):
        try:
            said.append(call(torch.arange(12.0).view(3, 4).t()).tolist())
        except Exception as error:  # gloo refuses; what counts is that both do the same
            said.append(type(error).__name__)
    if said[0] != said[1]:
        wrong.append(f"not contiguous: {said}")
    said = []
    for call in (group.all_gatherv, lambda x, sizes: coordinator.all_gatherv.__wrapped__(group, x, sizes)):
        try:
            said.append(call(torch.zeros(1 + rank), [1 + r for r in range(size)]).shape)
        except Exception as error:  # it needs NCCL; what counts is that both do the same
            said.append(type(error).__name__)
    if said[0] != said[1]:
        wrong.append(f"uneven: {said}")
    outs = [torch.empty(3) for _ in range(size)]
    group.all_gather(torch.full((3,), float(rank)), output_tensor_list=outs)
    if [o[0].item() for o in outs] != list(map(float, range(size))):
        wrong.append("list")
    return wrong


def sums(group, coordinator) -> dict:
    """The engine's own two steps: it asks for a method, then calls by it; and `auto`, as under Dynamo."""
    wrong, methods = [], []
    for seed, dtype in enumerate((torch.bfloat16, torch.float32, torch.float16)):
        for shape in ((6, 40), (3, 5), (4100,)):
            shards = [shard(shape, dtype, rank, seed) for rank in range(group.world_size)]
            x = shards[group.rank_in_group]
            method = group._resolve_outplace_all_reduce_method(x)
            methods.append(method)
            if method is None:
                continue
            before = x.clone()
            want = reference.all_reduce(shards)
            for way in (method, "auto"):
                if not same(group._all_reduce_out_place(x, way), want) or not same(x, before):
                    wrong.append(f"{dtype} {shape} {way}")
    ints = torch.ones(4, dtype=torch.int64)
    methods.append(group._resolve_outplace_all_reduce_method(ints))
    return {"wrong": wrong, "methods": methods}


def exported(adapter) -> list[str]:
    """Counters of the default Prometheus registry that are not the adapter's own counts."""
    wrong = []
    for (op, way), values in adapter.counts.items():
        for what, value in zip(("calls", "bytes"), values, strict=True):
            found = REGISTRY.get_sample_value(f"dsv41_collective_{what}_total", {"op": op, "way": way})
            if found != value:
                wrong.append(f"{what} {op} {way}: {found}, counted {value}")
    return wrong if adapter.counts else ["nothing was counted"]


def health(adapter) -> dict:
    """A result is looked at only after the runtime was: the event first, then the check, then the engine."""
    order = []
    event = SimpleNamespace(synchronize=lambda: order.append("event"))
    check = adapter.comm.check
    adapter.comm.check = lambda: (order.append("check"), check())
    stock = SimpleNamespace(reqs=[])
    with contextlib.suppress(Exception):  # the engine's own function wants a whole scheduler
        Scheduler.process_batch_result(SimpleNamespace(), stock, SimpleNamespace(copy_done=event))
    adapter.comm.check = check
    Faults.broken = "RDMA write to rank 1 failed: transport retry counter exceeded (vendor_err 0x81, seq 7)"
    said = "nothing"
    try:
        Scheduler.process_batch_result(SimpleNamespace(), stock, SimpleNamespace(copy_done=None))
    except RuntimeError as error:
        said = f"{type(error).__name__}: {error}"
    Faults.broken = ""
    return {"order": order, "said": said}


def main() -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    stand_in()
    if rank == 1:
        Faults.at = os.environ.get("PROBE_FAULT", "")
    publish(
        ServerArgs(model_path="dummy", tp_size=size, device="cpu"),
        role="test",
        ranks=SpawnRanks(world_rank=rank, gpu_id=0),
    )
    parallel_state.init_distributed_environment(
        world_size=size, rank=rank, local_rank=rank, backend="gloo", distributed_init_method="env://", timeout=120
    )
    parallel_state.initialize_model_parallel(backend="gloo")
    group, coordinator = parallel_state.get_tp_group(), parallel_state.GroupCoordinator
    with contextlib.suppress(AttributeError):  # the rest of it wants a model
        ModelRunner.load_model(SimpleNamespace())
    closure = dict(zip(coordinator.destroy.__code__.co_freevars, coordinator.destroy.__closure__, strict=True))
    adapter = closure["self"].cell_contents
    out = {"formed": adapter.comm is not None}
    if out["formed"]:
        out["checked"] = getattr(adapter.comm, "checked", False)
        out["wrong"], out["gathers"] = gathers(group, coordinator)
        out["wrong"] += left_to_the_engine(group, coordinator)
        out["sums"] = sums(group, coordinator)
        out["counts"] = {f"{op}: {way}": calls for (op, way), (calls, _) in adapter.counts.items()}
        out["runtime_calls"] = len(adapter.comm.transports["roce"]._runtime.calls)
        out["exported"] = exported(adapter)
        out["health"] = health(adapter)
    else:
        x = torch.full((2, 4), float(rank))
        out["wrong"] = [] if same(group.all_gather(x), coordinator.all_gather.__wrapped__(group, x, -1)) else ["stock"]
    out["report"] = boot.report()
    group.destroy()
    out["closed"] = adapter.group is None
    print(json.dumps(out), flush=True)
    sys.stdout.flush()
    os._exit(0)  # a closed communicator's side channel may still wait


main()
