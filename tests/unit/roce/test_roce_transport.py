"""RoceTransport without RDMA: real processes, real votes, a stand-in for b12x that is checked against its source."""

from __future__ import annotations

import json
import os

import pytest
import torch

from dsv41_dist.comm.ranks import Ranks
from dsv41_dist.comm.transports import TRANSPORTS, transport_class
from dsv41_dist.comm.transports.roce import RoceTransport

from ..stand_in_ranks import run_scenarios
from .fake_host import ENV, host, set_ip, write


def run(tmp_path, scenarios, world=4, **extra):
    """The ranks' results: for each scenario the list of what they said, by rank."""
    for rank in range(world):
        host(tmp_path / f"host{rank}", rank)
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("DSV41_", "B12X_", "NCCL_")) and k != "CC"}
    environment = {
        **clean,
        "PATH": f"{ENV['PATH']}:{os.environ['PATH']}",
        "DSV41_ROCE_ROOT": str(tmp_path / "host{rank}"),
        "DSV41_ROCE_MAX_MIB": "1",
        **extra,
    }
    return run_scenarios("tests.unit.roce.rank", scenarios, world, environment)


@pytest.mark.parametrize("world", [2, 4])
def test_every_operation_has_the_bits_of_the_reference(tmp_path, world):
    said = run(tmp_path, ["collectives", "hang_in_close"], world)
    for result in said["collectives"]:
        assert result["checked"] == 12 * 9 + 5
        assert result["routes"] == ["process_group", "roce"]
        assert result["calls"] > 100
    assert all(result["closing"] < 10 for result in said["hang_in_close"])  # the runtime's own close never ends


#: where rank 1 breaks, what it has set, what rank 0's warning says
CASES = [
    ("find", {}, "rank 1: b12x 1.3.0 has no comm.roce: pip install"),
    ("build", {}, "rank 1: RuntimeError: the test breaks 'build' here"),
    ("memory", {}, "rank 1: RuntimeError: the test breaks 'memory' here"),
    ("construct", {}, "rank 1: RuntimeError: the test breaks 'construct' here"),
    ("proxy", {}, "RoCE all-reduce setup failed: rank 1: the test breaks 'proxy' here"),
    ("connect", {}, "RoCE all-reduce connect failed: rank 1: the test breaks 'connect' here"),
    ("compile", {}, "preparation failed: rank 1: RuntimeError: the test breaks 'compile' here"),
    ("wrong", {}, "rank 1: TransportError: roce: the first all_gather on rank 1 gave"),
    ("", {"DSV41_ROCE_ROOT": "unplugged"}, "rank 1: spark-1: port 1: no device is ACTIVE"),
    ("", {"DSV41_ROCE_ROOT": "mtu"}, "rank 1: spark-1: rocep1s0f0 (enp1s0f0, 10.0.0.2): HCA 1: MTU is 1500"),
    ("", {"DSV41_ROCE_MAX_MIB": "2"}, "DSV41_ROCE_MAX_MIB differs: rank 0 1, rank 1 2"),
    ("", {"B12X_ROCE_HCA": "rocep1s0f0"}, "rank 1: spark-1: HCA count is 1, the others have 2"),
    ("", {"NCCL_IB_GID_INDEX": "2"}, "rank 1: spark-1: roceP2p1s0f0 GID 2: is IB/RoCE v1, not RoCE v2"),
]


@pytest.fixture(scope="module")
def attempts(tmp_path_factory):
    """All cases one after the other in the same four processes."""
    folder = tmp_path_factory.mktemp("hosts")
    host(folder / "unplugged", 1)
    for device in ("rocep1s0f0", "roceP2p1s0f0"):
        write(folder / "unplugged", f"sys/class/infiniband/{device}/ports/1/state", "1: DOWN")
    write(host(folder / "mtu", 1), "sys/class/net/enp1s0f0/mtu", "1500")
    cases = [
        (at, {k: str(folder / v) if k == "DSV41_ROCE_ROOT" else v for k, v in variables.items()})
        for at, variables, _ in CASES
    ]
    return run(folder, ["one_fails"], CASES=json.dumps(cases))["one_fails"]


@pytest.mark.parametrize("case", range(len(CASES)), ids=[at or str(*variables) for at, variables, _ in CASES])
def test_one_rank_that_cannot_takes_all_back_together(attempts, case):
    results = [result[case] for result in attempts]
    for rank, result in enumerate(results):
        assert result["transports"] == ["process_group"]
        assert result["total"] == [4.0, 4.0, 4.0]
        assert len(result["warnings"]) == (rank == 0)
    assert CASES[case][2] in results[0]["warnings"][0]
    print(f"{CASES[case][0]}: {max(result['took'] for result in results):.2f} s to fall back")


def test_preflight_names_the_unfit_host_with_its_fix(tmp_path):
    cases = [
        ({}, []),
        (
            {"DSV41_ROCE_ROOT": str(tmp_path / "spoiled")},
            [
                "rank 2: spark-2: roceP2p1s0f0 (enP2p1s0f0, 10.0.7.3): HCA 0: subnet is 10.0.7.0/24, the others",
                "rank 2: spark-2: rocep1s0f0 (enp1s0f0, 10.0.0.3): HCA 1: MTU is 1500, the others have 9000",
            ],
        ),
        ({"NCCL_IB_HCA": "^roceP2p1s0f0"}, ["rank 2: spark-2: HCA count is 1, the others have 2"]),
        ({"DSV41_ROCE_ROOT": "/nowhere"}, ["rank 2: DSV41_ROCE_ROOT='/nowhere' on rank 2: allowed is"]),
    ]
    set_ip(host(tmp_path / "spoiled", 2), "roceP2p1s0f0", "10.0.7.3")
    write(tmp_path / "spoiled", "sys/class/net/enp1s0f0/mtu", "1500")
    said = run(tmp_path, ["preflight"], PREFLIGHT=json.dumps([variables for variables, _ in cases]))["preflight"]
    for rank in range(4):
        for (variables, expected), got in zip(cases, said[rank][:-1], strict=True):
            assert got["wanted"]
            assert len(got["reasons"]) == len(expected), (variables, got)
            assert all(reason.startswith(start) for reason, start in zip(got["reasons"], expected, strict=True)), got
        assert said[rank][0]["rows"][0][:4] == ["0", "spark-0", "0: roceP2p1s0f0", "enP2p1s0f0"]
        assert said[rank][-1] == {"wanted": False}
    print("seconds:", [round(got["took"], 3) for got in said[0][:-1]])


@pytest.fixture(scope="module")
def failures(tmp_path_factory):
    return run(tmp_path_factory.mktemp("hosts"), ["skip", "proxy_error", "late_raise"])


def test_a_rank_that_leaves_a_collective_out_is_named_by_all(failures):
    for rank, result in enumerate(failures["skip"]):
        assert (result["missing"], result["kind"]) == ([1], "RankTimeout"), (rank, result)
        assert "waiting for rank 1, HCA 0" in result["text"]
        assert result["final"] == "RankTimeout"


def test_a_proxy_error_ends_all_ranks_and_names_the_peer(failures):
    for result in failures["proxy_error"]:
        assert (result["missing"], result["final"]) == ([2], "RankTimeout")
        assert "transport retry counter exceeded" in result["text"]


def test_max_gather_bytes_raised_late_on_one_rank_ends_all_ranks(failures):
    for result in failures["late_raise"]:
        assert result["final"] is not None
        assert "rank 1's runtime was changed after it was connected" in result["text"]


def test_registered_and_refused_with_a_reason_where_there_is_no_gpu():
    assert TRANSPORTS["roce"] == (".roce", "RoceTransport")
    assert transport_class("roce") is RoceTransport
    device = torch.device("cpu")
    assert "it needs CUDA tensors" in str(RoceTransport.probe(Ranks(0, 2, device, None, None, None)))
    assert "2 to 16 ranks, this group has 1" in str(RoceTransport.probe(Ranks(0, 1, device, None, None, None)))
