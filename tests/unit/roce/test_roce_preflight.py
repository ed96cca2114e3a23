"""preflight's RoCE section on four fake hosts, as a user starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .fake_host import ENV, host, set_ip, write

ROOT = Path(__file__).parents[3]


def preflight(folder, spoil=None):
    for rank in range(4):
        host(folder / f"host{rank}", rank)
    if spoil:
        spoil(folder / "host2")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("DSV41_", "B12X_", "NCCL_")) and k != "CC"}
    environment = {
        **clean,
        "OMP_NUM_THREADS": "1",
        "PATH": f"{ENV['PATH']}:{os.environ['PATH']}",
        "DSV41_ROCE_ROOT": str(folder / "host{rank}"),
    }
    command = [sys.executable, "-m", "dsv41_dist", "preflight", "--ranks", "4", "--json"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    return done.returncode, json.loads(done.stdout)


def test_four_healthy_hosts_are_ready(tmp_path):
    status, report = preflight(tmp_path)
    assert (status, report["ready"], report["reasons"]) == (0, True, [])
    assert [one["host"] for one in report["roce"]["roce"]] == [f"spark-{rank}" for rank in range(4)]


def _several(root):
    write(root, "sys/class/net/enp1s0f0/mtu", "1500")
    set_ip(root, "roceP2p1s0f0", "10.0.7.3")


def _unplugged(root):
    write(root, "sys/class/infiniband/rocep1s0f0/ports/1/state", "1: DOWN")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (
            _several,
            [
                "roce: rank 2: spark-2: roceP2p1s0f0 (enP2p1s0f0, 10.0.7.3): HCA 0: subnet is 10.0.7.0/24",
                "roce: rank 2: spark-2: rocep1s0f0 (enp1s0f0, 10.0.0.3): HCA 1: MTU is 1500, the others have 9000",
            ],
        ),
        (_unplugged, ["roce: rank 2: spark-2: HCA count is 1, the others have 2"]),
    ],
)
def test_an_unfit_host_is_not_ready_and_named(tmp_path, spoil, said):
    status, report = preflight(tmp_path, spoil)
    assert (status, report["ready"]) == (1, False)
    assert len(report["reasons"]) == len(said)
    for reason, start in zip(report["reasons"], said, strict=True):
        assert reason.startswith(start), reason
