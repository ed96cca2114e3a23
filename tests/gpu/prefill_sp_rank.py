"""prefill_sp on the engine's own classes on GPUs: torchrun --nproc-per-node N -m tests.gpu.prefill_sp_rank OUT.json

With the published SGLang on PYTHONPATH (launch/pack_engine.sh), the sitecustomize door before it, and the variables
DSV41_PREFILL_SP=1 DSV41_PREFILL_SP_EXACT=1. The model of tests/engine/prefill_model.py at the published width, over
NCCL: the engine's Triton kernels for statistics, combine and Engram run on all rows and on shards. Exact mode must give
stock's bytes (residual, pre, captured and tail rows); the reduce-scatter form is compared op by op with the all-reduce.
Times are of this model, whose attention and experts are a few matrix products: not those of a server.

PREFILL_DEVICE=cpu checks the script without a GPU (gloo, PREFILL_HIDDEN=64).
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

DEVICE = os.environ.get("PREFILL_DEVICE", "cuda")
os.environ.setdefault("PREFILL_HIDDEN", "5120")
os.environ.setdefault("SGLANG_ENABLE_JIT_DEEPGEMM", "0")
for _name in ("PRE", "POST"):
    os.environ.setdefault(f"SGLANG_OPT_USE_TILELANG_MHC_{_name}", "0")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from .absent import install  # noqa: E402

ABSENT = install()

from dsv41_dist.cli.environment import environment  # noqa: E402
from dsv41_dist.comm.settings import CommSettings  # noqa: E402
from tests.engine import prefill_model as small  # noqa: E402
from tests.engine import prefill_sp_probe as probe  # noqa: E402
from tests.engine.split_ranks import state_of  # noqa: E402

ROWS = (4096, 8192) if DEVICE == "cuda" else (256,)
# 4100: a shard that no tile divides. 2048: below the engine's fused kernels. late: the tail ends the shards at layer 2.
CASES: list[dict[str, Any]] = [
    *({"rows": rows} for rows in ROWS),
    {"rows": ROWS[0] + 4},
    {"rows": ROWS[0] // 2},
    {"rows": ROWS[0], "capture": (0, 2)},
    {"rows": ROWS[0], "late": 2, "tail": ROWS[0] // 32, "capture": (1, 3)},
    {"rows": ROWS[0], "late": 2, "tail": 32, "requests": 4, "replicated": True},
]


def start() -> None:
    from sglang.srt.distributed import parallel_state
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    backend = "nccl" if DEVICE == "cuda" else "gloo"
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
    torch.set_default_device(DEVICE)
    args = ServerArgs(model_path="dummy", tp_size=world, device=DEVICE, disable_custom_all_reduce=True)
    publish(args, role="test", ranks=SpawnRanks(world_rank=rank, gpu_id=rank))
    parallel_state.init_distributed_environment(
        world_size=world, rank=rank, local_rank=rank, backend=backend, distributed_init_method="env://", timeout=120
    )
    parallel_state.initialize_model_parallel(backend=backend)
    if DEVICE == "cpu":
        small.stand_ins()


class RowNorm:
    """RMSNorm in float64, rounded once: sgl_kernel's, which is not here, works row by row; torch's mean need not."""

    def __init__(self, norm: Any) -> None:
        self._norm = norm

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.double()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._norm.variance_epsilon)
        return (wide * scale * self._norm.weight.double()).to(x.dtype)


def build(which: str, **options: Any) -> Any:
    small.v4._is_cuda = which == "cuda"
    model = small.build(probe.layer_classes()[which], **options)
    for layer in model.layers:
        if DEVICE == "cuda":
            layer.refresh_mhc_norm_weight_cache()  # Hopper's split weights, as after loading
            for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                norm.forward = RowNorm(norm)
    return model


def timed(model: Any, rows: int) -> dict[str, float]:
    """Milliseconds of the third of three passes, the slowest rank's, and its peak of allocated MiB."""
    if DEVICE != "cuda":
        return {}
    took = 0.0
    for _ in range(3):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        dist.barrier()
        begin = time.perf_counter()
        probe.loop(model, rows)
        torch.cuda.synchronize()
        took = (time.perf_counter() - begin) * 1000
    seen = torch.tensor([took, torch.cuda.max_memory_allocated() / 2**20])
    dist.all_reduce(seen, op=dist.ReduceOp.MAX)
    return {"ms": round(float(seen[0]), 2), "peak_mib": round(float(seen[1]))}


def drive(which: str, case: dict[str, Any]) -> dict[str, Any]:
    case = dict(case)
    rows = case.pop("rows")
    options = {key: case.pop(key) for key in ("replicated", "late", "capture") if key in case}
    length = case.pop("tail", None)
    tail = None if length is None else small.tail_of(rows, case.get("requests", 1), length)
    model, out = build(which, **options), {}
    stock = probe.forward(model, rows, tail, **case)
    again = probe.forward(model, rows, tail, **case)
    out["stock_repeats"] = again["out"] == stock["out"]
    times = {"stock": timed(model, rows)} if not (options or tail) else {}
    state = state_of("prefill_sp")
    for name, asked in {
        "exact": {},
        "exact_compared": {"compare": True},
        "fast": {"mode": "fast", "compare": True},
        "comm": {"mode": "comm"},
    }.items():
        runtime = probe.adapted(model, **asked)
        passes = [probe.forward(model, rows, tail, **case) for _ in range(2)]
        out[name] = {
            "equal": [one["out"] == stock["out"] for one in passes],
            "largest": max(float((one["values"] - stock["values"]).abs().max()) for one in passes),
            "notes": state.notes[runtime._note :],
        }
        if times and name in ("exact", "comm"):
            times[name] = timed(model, rows)
    if times:
        probe.adapted(model, mode="fast")
        times["fast"] = timed(model, rows)
        out["times"] = times
    return {"layer": which, "rows": rows, "tail": length, **options, **case, **out}


def main() -> None:
    out: dict[str, Any] = {"results": [], "failed": []}
    code = 0
    try:
        start()
        for which in ("cuda",) if DEVICE == "cuda" else ("cuda", "platform"):
            for case in CASES:
                one = drive(which, case)
                out["results"].append(one)
                if one["stock_repeats"] and one["exact"]["equal"] != [True, True]:
                    out["failed"].append(f"{which} {case}: exact mode has other bytes than stock")
                if not one["stock_repeats"]:
                    out["failed"].append(f"{which} {case}: stock does not repeat its own bytes")
        code = 1 if out["failed"] else 0
    except BaseException as error:
        traceback.print_exc()
        out["failed"].append(f"{type(error).__name__}: {error}"[:2000])
        code = 1
    if os.environ.get("RANK") == "0":
        torch.set_default_device("cpu")
        block = environment(int(os.environ["WORLD_SIZE"]), "torchrun", DEVICE, CommSettings())
        Path(sys.argv[1]).write_text(json.dumps({"environment": block, "absent": ABSENT, **out}, indent=1) + "\n")
        print(json.dumps(out)[:8000], flush=True)
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
