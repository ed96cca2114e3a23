"""PeerTransport without a GPU: real processes, real votes, the real kernels on a CPU (kernels/peer_process.py)."""

import os

import pytest
import torch

from dsv41_dist.comm.errors import SettingsError
from dsv41_dist.comm.ranks import Ranks
from dsv41_dist.comm.transports import TRANSPORTS, transport_class
from dsv41_dist.comm.transports.peer import PeerSettings, PeerTransport
from tests.unit.stand_in_ranks import run_scenarios


def run(scenario, world):
    environment = {**os.environ, "DSV41_PEER_MAX_MIB": "1"}
    return run_scenarios("tests.unit.peer_rank", [scenario], world, environment)[scenario]


@pytest.mark.parametrize("world", [2, 3])
def test_every_operation_has_the_bits_of_the_reference(world):
    results = run("collectives", world)
    for result in results:
        assert result["checked"] >= 140
        assert result["freed"] == [True, True]
        assert {"copy_packet", "copy_line", "copy_bulk", "sum_packet_bf16", "sum_line_fp16", "sum_bulk_fp32"} <= set(
            result["kernels"]
        )


def test_a_withheld_rank_is_named_by_all_within_the_bound_and_a_second():
    results = run("withheld", 3)
    for rank, result in enumerate(results):
        assert result["missing"] == [1] or rank == 1, (rank, result)
        assert "rank 1 did not arrive at sum call 2" in result["text"]
        assert result["final"] is not None
    # The bound is 1 s; the verdict of the side channel may take the three heartbeats that are a part of "and a second".
    assert all(result["took"] < 1.0 + 1.0 + 1.0 for rank, result in enumerate(results) if rank != 1)


@pytest.mark.parametrize(("fault", "words"), [("allocate", "GPU is full"), ("open", "handle does not open")])
def test_one_rank_failing_takes_all_back_together(fault, words):
    results = run(fault, 3)
    for rank, result in enumerate(results):
        assert result["transports"] == ["process_group"]
        assert result["total"] == [3.0, 3.0, 3.0]
        assert len(result["warnings"]) == (rank == 0)
        assert result["freed"] == [True]
        assert result["took"] < 1.0
    assert f"rank 1: {'MemoryError' if fault == 'allocate' else 'OSError'}" in results[0]["warnings"][0]
    assert words in results[0]["warnings"][0]


def test_arenas_of_different_size_are_refused_by_every_rank():
    results = run("settings_differ", 2)
    assert [result["transports"] for result in results] == [["process_group"], ["process_group"]]
    said = "DSV41_PEER_MAX_MIB differs: rank 0 has 4, rank 1 2; set it alike on every rank"
    assert said in results[0]["warnings"][0]


def test_a_frozen_table_and_what_peer_does_not_carry():
    results = run("table", 2)
    assert results[0] == results[1]
    assert results[0] | {"digest": ""} == {
        "small": "peer",
        "large": "process_group",
        "max": "process_group",
        "double": "process_group",
        "gather": "peer",
        "cast": "process_group",
        "digest": "",
    }


def test_registered_and_refused_with_a_reason_where_there_is_no_gpu():
    assert "peer" in TRANSPORTS
    assert transport_class("peer") is PeerTransport
    device = torch.device("cpu")
    two = Ranks(0, 2, device, None, None, None)
    assert "it needs CUDA tensors" in str(PeerTransport.probe(two))
    assert "2 to 8 ranks, this group has 1" in str(PeerTransport.probe(Ranks(0, 1, device, None, None, None)))
    assert "2 to 8 ranks, this group has 9" in str(PeerTransport.probe(Ranks(0, 9, device, None, None, None)))


@pytest.mark.parametrize("text", ["0", "513", "-1", "64.5", "many"])
def test_a_bad_size_is_refused_by_name(text):
    with pytest.raises(SettingsError, match=f"DSV41_PEER_MAX_MIB='{text}'.*1 to 512"):
        PeerSettings.from_env({"DSV41_PEER_MAX_MIB": text})
    assert PeerSettings.from_env({"DSV41_PEER_MAX_MIB": ""}).max_mib == 16
    assert PeerSettings.from_env({"DSV41_PEER_MAX_MIB": "64"}).max_mib == 64
