"""The peer transport on real GPUs, under torchrun: world 2 and every GPU there is; more ranks than GPUs share them."""

import os
import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.gpu
GPUS = torch.cuda.device_count()


def torchrun(world, *scenarios, timeout=240):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "NCCL_NVLS_ENABLE": "0",
    }
    done = subprocess.run(
        [*command, "-m", "tests.gpu.peer_rank", *scenarios],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture(autouse=True)
def _two_gpus():
    if GPUS < 2:
        pytest.skip(f"needs 2 GPUs of one host, this machine has {GPUS}")


@pytest.mark.parametrize("scenario", ["bits", "graphs", "withheld", "streams", "soak"])
@pytest.mark.parametrize("world", sorted({2, max(2, GPUS)}))
def test_scenario(world, scenario):
    torchrun(world, scenario)


@pytest.mark.parametrize("world", [3, 8])
def test_ranks_that_share_gpus(world):
    torchrun(world, "shared")
