"""The layer benchmarks on real GPUs: the prefill row kernels are their twins, and each command passes its own checks.

python -m pytest tests/gpu/test_bench_gpu.py -m gpu
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dsv41_dist.cli.prefill_rows import STREAMS, combine_norm, make_mixer, mix, post
from tests.unit.bench import prefill_kernels

pytestmark = pytest.mark.gpu
GPUS = torch.cuda.device_count()
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _a_gpu():
    if not GPUS:
        pytest.skip("needs a GPU")


def test_the_row_kernels_are_their_twins():
    assert prefill_kernels.run("cuda", (64, 272, 5120), rows=256) == 3


@pytest.mark.parametrize("rows", [2048, 8192])
def test_a_row_s_bits_do_not_depend_on_how_many_rows_there_are(rows):
    gen = torch.Generator("cuda").manual_seed(rows)
    residual = torch.randn(rows, STREAMS, 5120, generator=gen, device="cuda", dtype=torch.bfloat16)
    y = torch.randn(rows, 5120, generator=gen, device="cuda", dtype=torch.bfloat16)
    weight = torch.rand(5120, generator=gen, device="cuda").bfloat16()
    mixer = make_mixer(5120, 1, torch.device("cuda"))
    whole = mix(residual, mixer)
    read, left = combine_norm(residual, whole[0], weight), post(residual, y, *whole[1:])
    for world in (2, 4, 8):
        held = rows // world
        for rank in range(world):
            part = slice(rank * held, (rank + 1) * held)
            mine = mix(residual[part], mixer)
            assert all(torch.equal(a, b[part]) for a, b in zip(mine, whole, strict=True))
            assert torch.equal(combine_norm(residual[part], mine[0], weight), read[part])
            assert torch.equal(post(residual[part], y[part], *mine[1:]), left[part])


def bench(world: int, *arguments: str) -> tuple[int, dict]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "NCCL_NVLS_ENABLE": "0",
    }
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    command = [*(start if world else [sys.executable]), "-m", "dsv41_dist", "bench", *arguments, "--json", "-"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, check=False, cwd=ROOT)
    assert done.stdout.strip(), done.stderr[-4000:]
    return done.returncode, json.loads(done.stdout)


@pytest.mark.parametrize("world", sorted({2, min(4, max(2, GPUS))}))
def test_rows_in_shards_have_the_bytes_of_whole_rows(world):
    if world > GPUS:
        pytest.skip(f"needs {world} GPUs of one host, this machine has {GPUS}")
    code, content = bench(world, "prefill", "--tokens", "2048", "--layers", "1", "-n", "3")
    rows = [row for row in content["rows"] if row["op"] == "prefill"]
    assert code == 0, rows
    exact = [row for row in rows if row["mode"] == "exact"]
    assert exact
    assert {row["differing"] for row in exact} == {0}
    carriers = {row["transport"] for row in rows}
    assert carriers == ({"process_group", "peer"} if "peer" in content["env"]["transports"] else {"process_group"})
    code, content = bench(world, "prefill", "--tokens", "1024", "--layers", "1", "-n", "1", "--flip-byte", "1")
    assert code != 0
    assert sum(row.get("wrong") or 0 for row in content["rows"]) > 0


def test_the_speculative_kernels_decide_as_their_twins_and_are_timed():
    code, content = bench(0, "verify", "--requests", "1,16", "--pairs", "1", "--temperature", "1", "-n", "3", "-G", "5")
    rows = [row for row in content["rows"] if row["op"] == "verify kernel"]
    assert code == 0, rows
    assert {row["graph"] for row in rows} == {5}
    assert all(row["p50_us"] > 0 for row in rows)
