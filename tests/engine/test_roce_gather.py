"""roce_gather on the real GroupCoordinator of three releases: four gloo ranks, a stand-in under the transport."""

from __future__ import annotations

import json
import re
import socket
import subprocess

import pytest

from tests.engine.real import HERE, RELEASES, engine_env
from tests.unit.roce.fake_host import host

WORLD = 4
pytestmark = pytest.mark.timeout(240)
GATES = {"DSV41_ROCE_GATHER": "4096", "DSV41_ONESHOT": "roce"}


def run(python, tree, folder, world=WORLD, **extra):
    """(status, last line of output, errors) of each rank."""
    for rank in range(world):
        host(folder / f"host{rank}", rank)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    ranks = []
    for rank in range(world):
        where = {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        root = {"DSV41_ROCE_ROOT": str(folder / "host{rank}"), "PATH": "/usr/bin:/bin"}
        env = engine_env(tree, **where, **root, **{**GATES, **extra})
        args = [python, str(HERE / "roce_gather_probe.py")]
        ranks.append(subprocess.Popen(args, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    out = []
    try:
        for process in ranks:
            said, errors = process.communicate(timeout=200)
            out.append((process.returncode, said.strip().rpartition("\n")[2], errors))
    finally:
        for process in ranks:
            process.kill()
    return out


def results(ended):
    for rank, (status, _, errors) in enumerate(ended):
        assert status == 0, f"rank {rank}: {errors[-3000:]}"
    return [json.loads(line) for _, line, _ in ended]


@pytest.fixture(scope="module", params=RELEASES)
def ranks(request, engine_python, published, tmp_path_factory):
    """The four ranks' results; the newest release also with all-reduces routed."""
    extra = {"DSV41_ROCE_ALLREDUCE": "2048"} if request.param == RELEASES[-1] else {}
    folder = tmp_path_factory.mktemp("hosts")
    return bool(extra), results(run(engine_python, published(request.param), folder, **extra))


def test_every_gather_has_the_bytes_of_stock(ranks):
    for result in ranks[1]:
        assert result["wrong"] == []
        assert result["gathers"] > 150


def test_calls_are_routed_or_counted_with_the_reason(ranks):
    for result in ranks[1]:
        counts = {name: calls for name, calls in result["counts"].items() if name.startswith("all_gather")}
        assert counts == {
            "all_gather: roce": result["gathers"],
            "all_gather: dtype": 2,
            "all_gather: too large": 1,
            "all_gather: not contiguous": 1,
            "all_gather: list of outputs": 1,
            "all_gather: uneven": 1,
        }
        assert result["runtime_calls"] >= result["gathers"]


def test_the_counts_are_exported_for_prometheus(ranks):
    for result in ranks[1]:
        assert result["exported"] == []


def test_checked_mode_compares_every_call_and_changes_none(engine_python, published, tmp_path):
    ended = run(engine_python, published(RELEASES[-1]), tmp_path, 2, DSV41_COMM_CHECK="1")
    for result in results(ended):
        assert (result["formed"], result["checked"], result["wrong"]) == (True, True, [])
        assert result["counts"]["all_gather: roce"] == result["gathers"] > 150


def test_sums_are_in_rank_order_with_one_rounding_or_left_alone(ranks):
    routed, said = ranks
    for result in said:
        assert result["sums"]["wrong"] == []
        ours = ["dsv41_oneshot", "dsv41_oneshot", None] if routed else [None] * 3
        assert result["sums"]["methods"] == [*ours * 3, None]
        if routed:
            assert result["counts"]["all_reduce: roce"] == 12
            assert result["counts"]["all_reduce: too large"] >= 3
            assert result["counts"]["all_reduce: not for roce"] == 1


def test_a_failed_runtime_stops_a_step_before_its_results_are_used(ranks):
    for result in ranks[1]:
        assert result["health"]["order"][:2] == ["event", "check"]
        assert "RankTimeout" in result["health"]["said"]
        assert "transport retry counter exceeded" in result["health"]["said"]


def test_the_report_has_routes_counts_memory_and_the_guarantee(ranks):
    routed, said = ranks
    for result in said:
        assert result["closed"]
        (entry,) = result["report"]["adapters"]
        assert (entry["adapter"], entry["state"]) == ("roce_gather", "fired")
        assert entry["guarantee"] == ("reordered sum" if routed else "bit-identical")
        assert len(entry["patched"]) == 8
        # 10 slots of 2 MiB and the flags, and scratch of seven.
        assert entry["memory_bytes"] == (10 << 21) + (64 << 10) + (7 << 21)
        (note,) = entry["notes"]
        assert note.startswith("over roce: all_gather to 4096 bytes" + (", all_reduce to 2048 bytes" if routed else ""))
        assert int(re.search(r"all_gather over roce >= (\d+) calls", note)[1]) >= 128
        assert "all_gather stock: dtype >= 2 calls" in note


def test_a_transport_that_was_asked_for_and_cannot_be_had_ends_all_ranks(engine_python, published, tmp_path):
    ended = run(engine_python, published(RELEASES[-1]), tmp_path, 2, PROBE_FAULT="build")
    assert [status for status, _, _ in ended] == [1, 1], ended[0][2][-3000:]
    assert "DSV41_ONESHOT=roce" in ended[0][2]
    assert "rank 1: RuntimeError: the test breaks 'build' here" in ended[0][2]
    for _, _, errors in ended:
        assert "dsv41_dist refuses to go on: roce_gather" in errors


def test_auto_takes_stock_on_every_rank_and_says_why(engine_python, published, tmp_path):
    # Ranks of one host: auto means peer, which needs GPUs.
    ended = run(engine_python, published(RELEASES[-1]), tmp_path, 2, DSV41_ONESHOT="auto")
    for result in results(ended):
        assert (result["formed"], result["wrong"]) == (False, [])
        (entry,) = result["report"]["adapters"]
        assert entry["state"] == "installed"
        assert entry["notes"][0].startswith("every call is stock: ")
    assert "it needs CUDA tensors" in results(ended)[0]["report"]["adapters"][0]["notes"][0]
