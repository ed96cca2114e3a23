"""main_proj and the split layers on real GPUs. The product on one GPU; the layers under torchrun on two or more, where
benchmarks/layer_split.py compares every split with the whole layer, eagerly and after graph replays."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dsv41_dist.kernels.main_proj import Twin, exact_twin, main_proj, weight_of

pytestmark = pytest.mark.gpu
GPUS = torch.cuda.device_count()
ROOT = Path(__file__).parents[2]
SHAPES = [(1280, 15360), (2560, 15360), (5120, 640), (100, 96), (64, 32)]


@pytest.fixture(autouse=True)
def _a_gpu():
    if not GPUS:
        pytest.skip("needs a GPU")


def twin_of(n: int, k: int) -> Twin:
    gen = torch.Generator("cuda").manual_seed(n + k)
    codes = torch.randint(0, 0x7F, (n, k), generator=gen, device="cuda", dtype=torch.uint8)
    sign = torch.randint(0, 2, (n, k), generator=gen, device="cuda", dtype=torch.uint8) * 0x80
    shift = torch.randint(-12, -4, (n, k // 32, 1), generator=gen, device="cuda")
    values = torch.ldexp((codes | sign).view(torch.float8_e4m3fn).double().view(n, k // 32, 32), shift)
    weight = values.view(n, k).to(torch.bfloat16)
    twin = exact_twin(weight)
    assert twin is not None
    assert torch.equal(weight_of(twin).view(torch.int16), weight.view(torch.int16))
    there = exact_twin(weight.cpu())
    assert there is not None
    for mine, other in zip(twin, there, strict=True):
        assert torch.equal(mine.cpu().view(torch.uint8), other.view(torch.uint8))
    return twin


def rows_of(m: int, k: int, seed: int = 0) -> torch.Tensor:
    gen = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(m, k, generator=gen, device="cuda").to(torch.bfloat16)


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_the_product_and_that_a_rows_bits_do_not_depend_on_the_others(n, k):
    twin = twin_of(n, k)
    weight = weight_of(twin, torch.float32).double()
    x = rows_of(16, k)
    whole = main_proj(x, twin)
    want, size = x.double() @ weight.t(), x.double().abs() @ weight.abs().t()
    error = (whole.double() - want).abs()
    assert bool((error <= want.abs() * 2.0**-8 + size * 2.0**-16).all()), float(error.max())
    for m in range(1, 17):
        part = main_proj(x[16 - m :].contiguous(), twin)
        assert torch.equal(part.view(torch.int16), whole[16 - m :].view(torch.int16)), m


def test_a_replayed_graph_gives_the_bits_of_an_eager_call():
    twin = twin_of(1280, 15360)
    x = rows_of(6, 15360)
    main_proj(x, twin)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = main_proj(x, twin)
    for seed in range(5):
        x.copy_(rows_of(6, 15360, seed))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out.view(torch.int16), main_proj(x, twin).view(torch.int16))


@pytest.mark.parametrize("world", sorted({2, min(4, max(2, GPUS))}))
def test_split_layers_over_gpus_have_the_bytes_of_whole_ones(world, tmp_path):
    if world > GPUS:
        pytest.skip(f"needs {world} GPUs of one host, this machine has {GPUS}")
    out = tmp_path / "layer_split.json"
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "NCCL_NVLS_ENABLE": "0",
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    done = subprocess.run(
        [*command, str(ROOT / "benchmarks" / "layer_split.py"), str(out)],
        capture_output=True,
        text=True,
        timeout=240,
        env=environment,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "wrong 0" in done.stdout.splitlines()[-1]
