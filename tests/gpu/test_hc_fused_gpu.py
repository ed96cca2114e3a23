"""hc_fused against the engine's own Triton kernels on a GPU: bytes, times, and the adapter's runtime.

    PYTHONPATH=.:ENGINE python tests/gpu/test_hc_fused_gpu.py OUT.json       (60 to 90 s)

ENGINE: the published SGLang's Python sources (launch/pack_engine.sh). The reference is `hc_mix_stats_sinkhorn`, two
Triton kernels: what every release runs for prefill on SM12x, and what the adapter replaces. On SM90 the release itself
would take its bf16x3 kernels from 32 rows on, or TileLang's sinkhorn: this adapter stands for neither.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
ROWS = (512, 1000, 2048, 2049, 4096, 8192)  # stock has another tile height from 2049 on
K, STREAMS, ITERATIONS = 20480, 4, 20
MIX = (2 + STREAMS) * STREAMS
INPUTS = 1000  # for each row count
SECONDS = 60.0  # for all comparisons
COLD_BYTES = 200_000_000  # inputs take turns over more than the L2 holds

pytestmark = pytest.mark.gpu


@pytest.mark.timeout(300)
def test_bytes_and_runtime(tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    out = tmp_path / "hc_fused.json"
    done = subprocess.run(
        [sys.executable, __file__, str(out)], capture_output=True, text=True, timeout=280, check=False
    )
    if done.returncode == 3:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(out.read_text())
    assert not report["failed"], report["failed"]
    assert sum(entry["inputs"] for entry in report["rows"]) >= INPUTS


def inputs_of(rows: int, seed: int) -> torch.Tensor:
    """Random rows whose size differs from row to row, with a few outliers and a row of zeros."""
    gen = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(rows, K, generator=gen, device="cuda", dtype=torch.bfloat16)
    x *= torch.logspace(-3, 3, rows, device="cuda")[torch.randperm(rows, generator=gen, device="cuda")][
        :, None
    ].bfloat16()
    x[seed % rows, seed % K] = 3e4
    x[(seed + 1) % rows] = 0
    return x


def parameters_of(seed: int) -> tuple:
    gen = torch.Generator("cuda").manual_seed(seed)
    weight = torch.randn(MIX, K, generator=gen, device="cuda") * K**-0.5
    scale = torch.rand(3, generator=gen, device="cuda") + 0.1
    base = torch.randn(MIX, generator=gen, device="cuda")
    return weight, scale, base, STREAMS, ITERATIONS, 1e-6, 1e-6


def milliseconds(calls: dict, xs: list, repeats: int) -> dict:
    """Median time of each call, taken in turns, on inputs that take turns."""
    times: dict = {name: [] for name in calls}
    for turn in range(repeats + 3):
        for name, call in calls.items():
            x = xs[turn % len(xs)]
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call(x)
            end.record()
            end.synchronize()
            if turn >= 3:
                times[name].append(start.elapsed_time(end))
    return {name: statistics.median(values) for name, values in times.items()}


def compare(rows: int, seconds: float, mhc, runtime, kernels, bandwidth: float) -> dict:
    """Every plan on a few inputs and the fastest on all; then a quarter of the rows against the whole."""
    parameters = parameters_of(rows)
    count = max(1, -(-COLD_BYTES // (rows * K * 2)))
    xs = [inputs_of(rows, 10_000 + i) for i in range(count)]
    calls: dict = {"stock": lambda x: mhc.hc_mix_stats_sinkhorn(x, *parameters)}
    differing: dict = {}
    for plan in kernels.PLANS:
        bad = 0
        for x in xs[:8]:
            want, got = calls["stock"](x), runtime.fused_stats(mhc, plan, (x, *parameters))
            bad += runtime.same_bytes(tuple(want), tuple(got)) is not None
        differing[str(plan)] = bad
        if not bad:
            calls[str(plan)] = lambda x, plan=plan: runtime.fused_stats(mhc, plan, (x, *parameters))
    times = milliseconds(calls, xs, 30)
    fit = [plan for plan in kernels.PLANS if str(plan) in times]
    entry: dict = {"rows": rows, "ms": times, "differing_by_plan": differing, "inputs": 0, "differing_inputs": None}
    moved = 2 * rows * K + 4 * MIX * K + 4 * rows * (MIX + 1)
    entry["floor_ms"] = moved / bandwidth * 1e3
    if not fit:
        return entry
    best = min(fit, key=lambda plan: times[str(plan)])
    entry["plan"], entry["ratio"] = str(best), times["stock"] / times[str(best)]
    until, bad = time.monotonic() + seconds, torch.zeros((), dtype=torch.int64, device="cuda")
    for seed in range(INPUTS):
        x = inputs_of(rows, seed)
        want, got = calls["stock"](x), runtime.fused_stats(mhc, best, (x, *parameters))
        differs = [(a.view(torch.int32) != b.view(torch.int32)).any() for a, b in zip(want, got, strict=True)]
        bad += torch.stack(differs).any()
        entry["inputs"] += 1
        if seed % 20 == 19:
            torch.cuda.synchronize()
            if time.monotonic() > until:
                break
    entry["differing_inputs"] = int(bad)
    whole = runtime.fused_stats(mhc, best, (xs[0], *parameters))
    shard = runtime.fused_stats(mhc, best, (xs[0][: rows // 4], *parameters))
    entry["shard_is_whole"] = runtime.same_bytes(tuple(shard), tuple(part[: rows // 4] for part in whole)) is None
    return entry


def drive(mhc, runtime) -> dict:
    """The adapter's runtime with a group of one: it measures, decides, fires, and leaves a graph capture alone."""
    import torch.distributed as dist

    from dsv41_dist.comm import Communicator, Ranks
    from dsv41_dist.engine.state import AdapterState

    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29517")
    dist.init_process_group("nccl")
    state = AdapterState("hc_fused", "bit-identical")
    comm = Communicator.create(Ranks.from_torch(device="cuda"))
    fused = runtime.HcFused(comm, state, mhc, None)
    parameters, stock, same = parameters_of(1), mhc.hc_mix_stats_sinkhorn, []
    with fused.prefill():
        for rows in (256, 512, 512, 2048, 2048, 8192, 8192):
            case = inputs_of(rows, rows), *parameters
            got, want = fused.run(stock, case), stock(*case)
            same.append(runtime.same_bytes(tuple(want), tuple(got)) is None)
        fired, graph, case = state.fired, torch.cuda.CUDAGraph(), (inputs_of(8192, 3), *parameters)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            fused.run(stock, case)
        captured = state.fired - fired
    comm.close()
    dist.destroy_process_group()
    return {"same": same, "notes": state.notes, "stock_calls": fused.stock_calls, "fired_in_capture": captured}


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: test_hc_fused_gpu.py OUT.json", file=sys.stderr)
        return 2
    sys.path.insert(0, str(ROOT))
    from tests.gpu.absent import install

    install()
    os.environ.setdefault("SGLANG_ENABLE_JIT_DEEPGEMM", "0")
    try:
        from sglang.kernels.ops.layernorm import mhc
    except ImportError as error:
        print(
            f"the engine's sources are not on PYTHONPATH ({error}): launch/pack_engine.sh packs them", file=sys.stderr
        )
        return 3
    import triton

    from dsv41_dist.adapters import _hc_runtime as runtime
    from dsv41_dist.cli.environment import environment
    from dsv41_dist.comm.settings import CommSettings
    from dsv41_dist.kernels import hc_fused as kernels

    began = time.monotonic()
    # Of an H200; elsewhere the floor is a scale, not a claim.
    bandwidth = 4.8e12
    report: dict = {
        "reference": "sglang.kernels.ops.layernorm.mhc.hc_mix_stats_sinkhorn (Triton)",
        "k": K, "streams": STREAMS, "sinkhorn_iterations": ITERATIONS,
        "environment": environment(1, "python", "cuda", CommSettings.from_env()),
        "engine": engine_version(), "triton": triton.__version__,
        "rows": [], "failed": [],
    }  # fmt: skip
    for rows in ROWS:
        try:
            entry = compare(rows, SECONDS / len(ROWS), mhc, runtime, kernels, bandwidth)
            report["rows"].append(entry)
            if entry["differing_inputs"] != 0 or not entry["shard_is_whole"]:
                report["failed"].append(f"{rows} rows: {entry}")
            print(json.dumps(entry), flush=True)
        except Exception:
            report["failed"].append(f"{rows} rows: {traceback.format_exc()}")
    try:
        report["runtime"] = drive(mhc, runtime)
        if not all(report["runtime"]["same"]) or report["runtime"]["fired_in_capture"]:
            report["failed"].append(f"runtime: {report['runtime']}")
    except Exception:
        report["failed"].append(f"runtime: {traceback.format_exc()}")
    report["seconds"] = time.monotonic() - began
    Path(sys.argv[1]).write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report.get("runtime")), flush=True)
    for line in report["failed"]:
        print(f"FAILED {line}", file=sys.stderr)
    return 1 if report["failed"] else 0


def engine_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("sglang")
    except PackageNotFoundError:
        import sglang

        return f"at {Path(sglang.__file__).parent}"


if __name__ == "__main__":
    raise SystemExit(main())
