"""prefill_sp on the engine's own classes on GPUs: torchrun --nproc-per-node N -m tests.gpu.prefill_sp_rank OUT.json

With the published SGLang on PYTHONPATH (launch/pack_engine.sh), the sitecustomize door before it, and the variables
DSV41_PREFILL_SP=1 DSV41_PREFILL_SP_EXACT=1. The model of tests/engine/prefill_model.py at the published width, over
NCCL: the engine's Triton kernels for statistics, combine and Engram run on all rows and on shards. Exact mode must give
stock's bytes (residual, pre, captured and tail rows) on every rank; the reduce-scatter form is compared op by op with
the all-reduce. Times are of this model, whose attention and experts are a few matrix products (in TF32) and whose
update is torch's (TileLang's kernel is not here): not those of a server.

OUT.json is written after every step, so a run that is cut leaves what it has. Each rank says on stderr where it is, and
where it stands every 60 s. A rank exits with 1 when something is wrong, and with 3 when PREFILL_BUDGET_S (200) ended
before the last case; torchrun then exits with 1.

PREFILL_DEVICE=cpu checks the script without a GPU (gloo, PREFILL_HIDDEN=64). PREFILL_ROWS, PREFILL_CASES: fewer.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import math
import os
import statistics
import sys
import time
import traceback
from pathlib import Path
from typing import Any

BEGIN = time.perf_counter()
RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
faulthandler.enable()
faulthandler.dump_traceback_later(60, repeat=True, file=sys.stderr)


def say(text: str) -> None:
    sys.stderr.write(f"[rank {RANK} {time.perf_counter() - BEGIN:6.1f} s] {text}\n")  # one write: ranks share it
    sys.stderr.flush()


say("started; importing torch")
DEVICE = os.environ.get("PREFILL_DEVICE", "cuda")
BUDGET_S = float(os.environ.get("PREFILL_BUDGET_S", "200"))
os.environ.setdefault("PREFILL_HIDDEN", "5120")
os.environ.setdefault("DSV41_ONESHOT", "off")  # NCCL alone
os.environ.setdefault("SGLANG_ENABLE_JIT_DEEPGEMM", "0")
for _name in ("PRE", "POST"):
    os.environ.setdefault(f"SGLANG_OPT_USE_TILELANG_MHC_{_name}", "0")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from .absent import install  # noqa: E402
from .mix_repeats import differing_calls  # noqa: E402

ABSENT = install()
say("importing the engine")

from dsv41_dist.cli.environment import environment  # noqa: E402
from dsv41_dist.comm.settings import CommSettings  # noqa: E402
from tests.engine import prefill_model as small  # noqa: E402
from tests.engine import prefill_sp_probe as probe  # noqa: E402
from tests.engine.split_ranks import state_of  # noqa: E402

say("imported")

ROWS = tuple(int(n) for n in os.environ.get("PREFILL_ROWS", "4096,8192" if DEVICE == "cuda" else "256").split(","))
# 4100: a shard that no tile divides. late: the tail ends the shards at layer 2. 2048: on Hopper 0.5.23 makes the
# statistics of 32 to 4095 rows by a pipelined kernel which, compiled by Triton 3.6, does not repeat its own bytes
# (mix_repeats counts it). So that size runs with the engine's other kernel too, with the first one where it repeats.
CASES: list[dict[str, Any]] = [
    *({"rows": rows} for rows in ROWS),
    {"rows": ROWS[0] + 4},
    {"rows": ROWS[0] // 2, "prenorm": "0"},
    {"rows": ROWS[0] // 2},
    {"rows": ROWS[0], "capture": (0, 2)},
    {"rows": ROWS[0], "late": 2, "tail": ROWS[0] // 32, "capture": (1, 3)},
    {"rows": ROWS[0], "late": 2, "tail": 32, "requests": 4, "replicated": True},
][: int(os.environ.get("PREFILL_CASES", "99"))]
# In this order: what must be equal first.
MODES: dict[str, dict[str, Any]] = {
    "exact": {},
    "exact_compared": {"compare": True},
    "fast": {"mode": "fast", "compare": True},
    "comm": {"mode": "comm"},
}
WARMUP, PASSES = 2, 5

_drawn: dict[tuple[Any, ...], torch.Tensor] = {}


def draw(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    """prefill_model.draw, made on the device and kept: a model here has 10^9 weights, and a pass 10^8 inputs."""
    key = (shape, seed, scale)
    if key not in _drawn:
        where = torch.device(DEVICE, torch.cuda.current_device()) if DEVICE == "cuda" else torch.device("cpu")
        gen = torch.Generator(where).manual_seed(seed)
        _drawn[key] = torch.randn(*shape, generator=gen, device=where).mul_(scale)
    return _drawn[key]


small.draw = draw


class Spent(Exception):
    """The budget is spent, on every rank at the same place."""


class Report:
    """What rank 0 writes to `path`, after every step; any other rank writes only what failed, beside it."""

    def __init__(self, path: Path) -> None:
        self.path = path if RANK == 0 else path.with_name(f"{path.stem}.rank{RANK}{path.suffix}")
        self.out: dict[str, Any] = {"environment": None, "absent": ABSENT, "results": [], "failed": [], "not_run": []}
        self.out["stock_does_not_repeat"] = []

    def save(self) -> None:
        if RANK and not self.out["failed"]:
            return
        self.out["seconds"] = round(time.perf_counter() - BEGIN, 1)
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(self.out, indent=1) + "\n")
        partial.replace(self.path)

    def fail(self, text: str) -> None:
        say(f"FAILED: {text}")
        self.out["failed"].append(text[:2000])
        self.save()


def start() -> str:
    """The engine's own start-up order, and the adapters' communicator; returns what it carries data over."""
    from sglang.srt.distributed import parallel_state
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    from dsv41_dist.adapters._split_group import shared

    backend = "nccl" if DEVICE == "cuda" else "gloo"
    local = int(os.environ.get("LOCAL_RANK", RANK))
    if DEVICE == "cuda":
        torch.cuda.set_device(local)
        # Attention's and the experts' stand-ins only: no row kernel is a float32 product.
        torch.backends.cuda.matmul.allow_tf32 = True
    args = ServerArgs(model_path="dummy", tp_size=WORLD, device=DEVICE, disable_custom_all_reduce=True)
    publish(args, role="test", ranks=SpawnRanks(world_rank=RANK, gpu_id=local))
    # A server does this from its arguments; without it the engine compiles its own all-reduce here.
    parallel_state.set_custom_all_reduce(False)
    say("server arguments; joining the group")
    parallel_state.init_distributed_environment(
        world_size=WORLD, rank=RANK, local_rank=local, backend=backend, distributed_init_method="env://", timeout=120
    )
    parallel_state.initialize_model_parallel(backend=backend)
    say("engine's groups are there")
    dist.all_reduce(torch.ones(1, device=DEVICE))
    group = parallel_state.get_tp_group()
    group.all_reduce(torch.ones(WORLD, 64, dtype=torch.bfloat16, device=DEVICE))
    say(f"first sum over {backend}; making the adapters' communicator")
    transport = shared(group, state_of("prefill_sp")).transport or "process_group"
    say(f"communicator: {transport}")
    torch.set_default_device(DEVICE)
    if DEVICE == "cuda":
        # TileLang's Sinkhorn is not here; without the bf16x3 statistics the engine wants it.
        from sglang.kernels.ops.layernorm import mhc

        mhc.hc_split_sinkhorn = mhc._hc_split_sinkhorn_triton
    if DEVICE == "cpu":
        small.stand_ins()
    return transport


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


def everyone(*values: float, op: Any = dist.ReduceOp.MAX) -> list[float]:
    """The largest (or smallest) of all ranks."""
    seen = torch.tensor(values, dtype=torch.float64, device=DEVICE)
    dist.all_reduce(seen, op=op)
    return seen.tolist()


def in_time() -> None:
    if everyone(time.perf_counter() - BEGIN)[0] > BUDGET_S:
        raise Spent


def forward(model: Any, rows: int, tail: Any, **case: Any) -> list[torch.Tensor]:
    """Everything that a pass through the loop gives on this rank."""
    return [one.contiguous() for one in probe.loop(model, rows, tail, **case)]


def differing(a: list[torch.Tensor], b: list[torch.Tensor]) -> int:
    """Bytes that differ, on the worst rank."""
    assert [(x.shape, x.dtype) for x in a] == [(x.shape, x.dtype) for x in b]
    pairs = ((x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(a, b, strict=True))
    return int(everyone(sum(0 if torch.equal(x, y) else int((x != y).sum()) for x, y in pairs))[0])


def largest(a: list[torch.Tensor], b: list[torch.Tensor]) -> list[float]:
    """Largest difference of residual and pre, and the largest value of stock's residual: of all ranks."""
    apart = [float((x.float() - y.float()).abs().max()) for x, y in zip(a[:2], b[:2], strict=True)]
    return everyone(*apart, float(b[0].abs().max()))


def timed(model: Any, rows: int) -> dict[str, float]:
    """Milliseconds of a pass, the median of PASSES, and its peak of MiB beyond what was there; of the worst rank."""
    if DEVICE != "cuda":
        return {}
    took: list[float] = []
    gc.collect()
    before = torch.cuda.memory_allocated()
    for _ in range(WARMUP + PASSES):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        dist.barrier()
        begin = time.perf_counter()
        probe.loop(model, rows)
        torch.cuda.synchronize()
        took.append((time.perf_counter() - begin) * 1000)
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    ms, worst, mib = everyone(statistics.median(took[WARMUP:]), max(took[WARMUP:]), peak)
    return {"ms": round(ms, 3), "worst_ms": round(worst, 3), "peak_mib": round(mib)}


def drive(report: Report, which: str, case: dict[str, Any]) -> None:
    """One case into the report, part by part."""
    prenorm = case.get("prenorm")
    before = os.environ.pop("SGLANG_OPT_DEEPGEMM_HC_PRENORM", None)
    if prenorm is not None:
        os.environ["SGLANG_OPT_DEEPGEMM_HC_PRENORM"] = prenorm
    try:
        _drive(report, which, case)
    finally:
        os.environ.pop("SGLANG_OPT_DEEPGEMM_HC_PRENORM", None)
        if before is not None:
            os.environ["SGLANG_OPT_DEEPGEMM_HC_PRENORM"] = before


def _drive(report: Report, which: str, case: dict[str, Any]) -> None:
    one: dict[str, Any] = {"layer": which, **case, "part": "build"}
    name = f"{which} {case}"
    report.out["results"].append(one)
    case = dict(case)
    rows = case.pop("rows")
    default = case.pop("prenorm", None) is None
    options = {key: case.pop(key) for key in ("replicated", "late", "capture") if key in case}
    length = case.pop("tail", None)
    tail = None if length is None else small.tail_of(rows, case.get("requests", 1), length)

    def part(text: str) -> None:
        report.save()
        in_time()
        one["part"] = text
        say(f"{name}: {text}")

    part("build")
    model = build(which, **options)
    part("stock (compiles at first)")
    stock = forward(model, rows, tail, **case)
    one["outputs"] = [list(x.shape) for x in stock]
    repeats = differing(forward(model, rows, tail, **case), stock)
    one["stock_repeats"] = repeats == 0
    if repeats and DEVICE == "cuda" and default and 32 <= rows < 4096:
        # Nothing can have the bytes of what has none of its own. The same size with the other kernel must pass.
        one["part"] = "done"
        report.out["stock_does_not_repeat"].append(f"{name}: {repeats} bytes")
        say(f"{name}: stock does not repeat its own bytes, {repeats} differ: not compared")
        return
    if repeats:
        report.fail(f"{name}: stock does not repeat its own bytes, {repeats} differ")
    times: dict[str, Any] = {}
    has_times = not (options or tail)
    if has_times:
        part("stock, timed")
        one["times"] = times
        times["stock"] = timed(model, rows)
    state = state_of("prefill_sp")
    for mode, asked in MODES.items():
        part(mode)
        runtime = probe.adapted(model, **asked)
        passes = [forward(model, rows, tail, **case) for _ in range(2)]
        apart = [differing(got, stock) for got in passes]
        residual, pre, size = (max(pair) for pair in zip(*(largest(got, stock) for got in passes), strict=True))
        notes = state.notes[runtime._note :]
        one[mode] = {
            "equal": [bytes_off == 0 for bytes_off in apart],
            "bytes_off": apart,
            "largest": {"residual": residual, "pre": pre, "of": size},
            "chunks": runtime.sharded,
            "notes": notes,
        }
        del passes
        if RANK == 0:
            say(f"{name}: {mode}: bytes off {apart}, largest {residual:g} of {size:g}; {'; '.join(notes)}")
        if not math.isfinite(size):
            report.fail(f"{name}: stock's residual is not finite: equal bytes of it show nothing")
        if runtime.sharded != 2:
            report.fail(f"{name}: {mode}: {runtime.sharded} of 2 chunks went through the adapter: {notes}")
        if mode.startswith("exact") and any(apart):
            report.fail(f"{name}: {mode}: {apart} bytes are not stock's")
        if asked.get("compare") and not any("0 differing bytes on every rank" in note for note in notes):
            report.fail(f"{name}: {mode}: row kernels on shards have other bytes than on all rows: {notes}")
        if has_times and mode in ("exact", "comm"):
            part(f"{mode}, timed")
            times[mode] = timed(model, rows)
    if has_times:
        part("fast, timed")
        probe.adapted(model, mode="fast")
        times["fast"] = timed(model, rows)
        if RANK == 0:
            say(f"{name}: times {times}")
    one["part"] = "done"
    report.save()


def run(report: Report) -> int:
    if RANK == 0:
        report.out["environment"] = environment(WORLD, "torchrun", DEVICE, CommSettings())
        report.save()
    report.out["transport"] = start()
    if DEVICE == "cuda":
        width = small.STREAMS * int(os.environ["PREFILL_HIDDEN"])
        report.out["bf16x3_calls_that_differ"] = {rows: differing_calls(rows, width) for rows in (512, 2048, 4096)}
        say(f"bf16x3 statistics, calls of 20 that differ: {report.out['bf16x3_calls_that_differ']}")
    left = [(which, case) for which in (("cuda",) if DEVICE == "cuda" else ("cuda", "platform")) for case in CASES]
    while left:
        try:
            drive(report, *left[0])
        except Spent:
            if report.out["results"][-1]["part"] != "done":
                report.out["results"][-1]["cut"] = True
            report.out["not_run"] = [f"{which} {case}" for which, case in left]
            say(f"{BUDGET_S:g} s are spent; not run or cut: {report.out['not_run']}")
            break
        left.pop(0)
        gc.collect()
    report.save()
    return 1 if report.out["failed"] else 3 if left else 0


def main() -> None:
    report = Report(Path(sys.argv[1]))
    try:
        code = run(report)
    except BaseException as error:
        traceback.print_exc()
        report.fail(f"rank {RANK}: {type(error).__name__}: {error}")
        code = 1
    if RANK == 0:
        keys = ("seconds", "failed", "not_run", "stock_does_not_repeat")
        print(json.dumps({key: report.out[key] for key in keys}), flush=True)
    say(f"exit code {code}")
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
