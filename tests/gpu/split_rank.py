"""The split layers on the engine's own classes on GPUs: torchrun --nproc-per-node N -m tests.gpu.split_rank OUT.json

With the published SGLang on PYTHONPATH (launch/pack_engine.sh) and the sitecustomize door before it. The real
ReplicatedLinear in bf16 and in block fp8 (the engine's Triton GEMM; its input is quantized beforehand, which is
sgl_kernel's work) and the real draft class; eager and in CUDA graphs, byte-equal to the stock forward; microseconds per
call in a graph, in one run. Layers take turns over more weight than the L2 holds, as the layers of a model do.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .absent import install

ABSENT = install()
os.environ.setdefault("SGLANG_ENABLE_JIT_DEEPGEMM", "0")

from sglang.srt.layers.layernorm import RMSNorm  # noqa: E402
from sglang.srt.layers.linear import ReplicatedLinear  # noqa: E402
from sglang.srt.model_executor import model_runner  # noqa: E402, F401  (a patched module: it must import)
from sglang.srt.models.deepseek_v4_dspark import DeepseekV4ForCausalLMDSpark  # noqa: E402

from dsv41_dist.adapters import draft_main_proj, replicated_split  # noqa: E402
from dsv41_dist.cli.environment import environment  # noqa: E402
from dsv41_dist.comm.settings import CommSettings  # noqa: E402
from tests.engine import split_fp8  # noqa: E402
from tests.engine.split_ranks import runner, state_of, tree  # noqa: E402

NAME = "model.layers.{}.self_attn.wqkv_a"
ROWS = (1, 6, 16, 48, 96)
INNER, REPLAYS = 24, 15
ROTATED_BYTES = 200_000_000


def start() -> Any:
    from sglang.srt.distributed import parallel_state
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank)
    torch.set_default_device("cuda")
    torch.manual_seed(7)
    fields = {"model_path": "dummy", "tp_size": world, "device": "cuda", "disable_custom_all_reduce": True}
    args = ServerArgs(**fields)
    publish(args, role="test", ranks=SpawnRanks(world_rank=rank, gpu_id=rank))
    parallel_state.init_distributed_environment(
        world_size=world, rank=rank, local_rank=rank, backend="nccl", distributed_init_method="env://", timeout=120
    )
    parallel_state.initialize_model_parallel(backend="nccl")
    return args


def plain(n: int, k: int) -> ReplicatedLinear:
    layer = ReplicatedLinear(k, n, bias=False, params_dtype=torch.bfloat16)
    layer.weight.data.normal_(0, 0.05)
    return layer.requires_grad_(False)


def block_fp8(n: int, k: int) -> ReplicatedLinear:
    layer = split_fp8.block_layer(n, k, block=128)
    split_fp8.real_block_gemm(layer)
    return layer


def pair(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What the engine's quantizer hands to a 128-column block GEMM."""
    groups = x.float().view(x.shape[0], -1, 128)
    scale = groups.abs().amax(-1).clamp(min=1e-10) / 448
    return (groups / scale[..., None]).to(torch.float8_e4m3fn).view(x.shape), scale


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def assign(to: Any, value: Any) -> None:
    for a, b in zip(to, value, strict=True) if isinstance(to, tuple) else ((to, value),):
        a.copy_(b)


def capture(calls: list[Any], times: int = 1) -> tuple[torch.cuda.CUDAGraph, list[Any]]:
    """`times` calls in one graph, taking turns."""
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = [calls[i % len(calls)]() for i in range(times)]
    return graph, out


def microseconds(calls: list[Any]) -> float:
    """Median over replays of a graph of INNER calls; the slowest rank's."""
    graph, _ = capture(calls, INNER)
    took = []
    for _ in range(REPLAYS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        dist.barrier()
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        took.append(begin.elapsed_time(end) * 1000 / INNER)
    mine = torch.tensor([statistics.median(took)])
    dist.all_reduce(mine, op=dist.ReduceOp.MAX)
    return round(float(mine), 2)


def drive(turns: list[ReplicatedLinear], make: Any) -> dict[str, Any]:
    """The first layer against stock at every row count; all of them for the times."""
    stock = ReplicatedLinear.forward.__wrapped__  # pyright: ignore[reportFunctionMemberAccess]
    state, layer = state_of("replicated_split"), turns[0]
    out: dict[str, Any] = {"layers": len(turns), "eager_equal": True, "graph_equal": True, "rows": {}}

    def rows_of(m: int, seed: int) -> Any:
        gen = torch.Generator("cuda").manual_seed(seed)
        return make(torch.randn(m, layer.input_size, generator=gen).to(torch.bfloat16))

    for m in ROWS:
        x = rows_of(m, m)
        for one in turns:  # decides
            out["eager_equal"] &= same(one(x)[0], stock(one, x)[0])
        fired = state.fired
        out["eager_equal"] &= same(layer(x)[0], stock(layer, x)[0])
        split = state.fired > fired
        graph, got = capture([lambda x=x: layer(x)[0]])
        for seed in range(20):
            assign(x, rows_of(m, 1000 + seed))
            graph.replay()
            torch.cuda.synchronize()
            out["graph_equal"] &= same(got[0], stock(layer, x)[0])
        ours = microseconds([lambda x=x, one=one: one(x)[0] for one in turns])
        theirs = microseconds([lambda x=x, one=one: stock(one, x)[0] for one in turns])
        out["rows"][m] = {"split": split, "us": ours, "stock_us": theirs, "times": round(theirs / ours, 2)}
    return out


def layers(args: Any) -> dict[str, Any]:
    out = {}
    kinds = {
        "bf16 1792x5120": (plain, 1792, lambda x: x),
        "bf16 5120x5120": (plain, 5120, lambda x: x),
        "bf16 25600x5120": (plain, 25600, lambda x: x),
        "fp8 1792x5120": (block_fp8, 1792, pair),
        "fp8 25600x5120": (block_fp8, 25600, pair),
    }
    os.environ.update(DSV41_REPLICATED_SPLIT="wqkv_a", DSV41_SPLIT_COMPACT_GATHER="1")
    state = state_of("replicated_split")
    for name, (build, n, make) in kinds.items():
        first = build(n, 5120)
        count = min(12, -(-ROTATED_BYTES // first.weight.nbytes))
        turns = [first, *(build(n, 5120) for _ in range(count - 1))]
        replicated_split.attach(runner(args, tree({NAME.format(i): one for i, one in enumerate(turns)})), state)
        out[name] = drive(turns, make)
    carriers = sorted(vars(first)[replicated_split._SPLIT]._checks.comm.transports)
    return {"transports": carriers, "kinds": out, "notes": state.notes, "memory_bytes": state.memory_bytes}


def draft(args: Any) -> dict[str, Any]:
    """project_target_hidden of the real class; stock is the fp8 layer's own GEMM on the quantized activation."""
    n, k = 5120, 15360
    layer = plain(n, k)  # what a 32 x 32 block fp8 checkpoint holds, dequantized
    scale = torch.exp2(torch.randint(-9, -4, (n // 32, k // 32)).float())
    codes = torch.randn(n, k).clamp(-4, 4).to(torch.float8_e4m3fn).float()
    layer.weight.data.copy_(codes * scale.repeat_interleave(32, 0).repeat_interleave(32, 1))
    model = DeepseekV4ForCausalLMDSpark.__new__(DeepseekV4ForCausalLMDSpark)
    torch.nn.Module.__init__(model)
    stage = torch.nn.Module()
    stage.main_proj, stage.main_norm = layer, RMSNorm(n)
    stage.main_norm.forward = stage.main_norm.forward_native  # its CUDA form is sgl_kernel's
    model.stages = torch.nn.ModuleList([stage.requires_grad_(False)])
    os.environ["DSV41_DRAFT_MAIN_PROJ_SPLIT"] = "1"
    state = state_of("draft_main_proj")
    draft_main_proj.attach(runner(args, model, is_draft_worker=True), state)
    stock = DeepseekV4ForCausalLMDSpark.project_target_hidden.__wrapped__  # pyright: ignore[reportFunctionMemberAccess]
    proj = vars(model)[draft_main_proj._PROJ]
    out: dict[str, Any] = {"notes": state.notes, "rows": {}, "graph_equal": True, "ranks_equal": True}
    for m in (1, 6, 16):
        gen = torch.Generator("cuda").manual_seed(m)
        x = torch.randn(m, k, generator=gen).to(torch.bfloat16)
        fired = state.fired
        eager = model.project_target_hidden(x)
        assert state.fired > fired, state.notes
        everyone = [torch.empty_like(eager) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, eager)
        out["ranks_equal"] &= all(same(one, eager) for one in everyone)
        graph, got = capture([lambda x=x: model.project_target_hidden(x)])
        graph.replay()
        torch.cuda.synchronize()
        out["graph_equal"] &= same(got[0], eager)
        off = (eager.float() - stock(model, x).float()).abs().max() / stock(model, x).float().abs().mean()
        ours, theirs = microseconds([lambda x=x: proj(x)]), microseconds([lambda x=x: layer(x)[0]])
        out["rows"][m] = {
            "us": ours,
            "bf16_layer_us": theirs,
            "times": round(theirs / ours, 2),
            "off": round(float(off), 4),
        }
    return out


def main() -> None:
    out: dict[str, Any] = {}
    code = 0
    try:
        args = start()
        out = {"layers": layers(args), "draft": draft(args)}
        kinds = out["layers"]["kinds"].values()
        if not all(one["eager_equal"] and one["graph_equal"] for one in kinds) or not out["draft"]["ranks_equal"]:
            code = 1
        # A layer whose half has other bits (cuBLAS chose another kernel for it) is rightly stock; not all of them are.
        if not any(one["rows"][6]["split"] for one in kinds):
            code = 1
    except BaseException as error:
        traceback.print_exc()
        out["error"], code = f"{type(error).__name__}: {error}"[:2000], 1
    if os.environ.get("RANK") == "0":
        torch.set_default_device("cpu")
        block = environment(int(os.environ["WORLD_SIZE"]), "torchrun", "cuda", CommSettings())
        Path(sys.argv[1]).write_text(json.dumps({"environment": block, "absent": ABSENT, **out}, indent=1) + "\n")
    print(json.dumps(out)[:6000], flush=True)
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
