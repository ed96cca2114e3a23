"""Faults injected into real rank sets: every live rank gets the same error with the right names, in bounded time."""

import signal
import subprocess
import sys
import time

import pytest

from dsv41_dist.cli.session import Place, run
from dsv41_dist.cli.spawn import RankSet, run_ranks

from . import targets

SIZE, LOST, BOUND = 4, targets.LOST, 3.0


def _lose(how, call, size=SIZE):
    lost = LOST % size
    live = [rank for rank in range(size) if rank != lost]
    with RankSet(size, targets.lose, (how, BOUND, call)) as ranks:
        results = ranks.wait(BOUND + 40, live)
        if how == "stop":
            ranks.resume(lost)
            results += ranks.wait(20, [lost])
    return {result.rank: result for result in results}, lost, live


@pytest.mark.parametrize("call", ["all_reduce", "all_gather", "agree", "barrier"])
@pytest.mark.parametrize(("how", "state"), [("kill", "dead"), ("stop", "stopped"), ("skip", "alive"), ("exit", "dead")])
def test_a_lost_rank_is_named_by_every_live_rank(how, state, call, capsys):
    results, lost, live = _lose(how, call)
    for rank in live:
        assert results[rank].error is None, results[rank].trace
        found = results[rank].value
        assert found["error"] == "RankTimeout"
        assert found["missing"] == [lost]
        assert found["states"] == {lost: state}
        assert found["label"] == "lost"
        assert found["reached"][lost][0] == "before"
        assert all(found["reached"][r] == found["reached"][live[0]] for r in live)
        assert f"rank {lost} ({state}, last reached 'before' #" in found["text"]
        assert found["again"] is True
        assert found["sum"] == [SIZE - 1.0] * 2
    assert len({results[rank].value["text"] for rank in live}) == 1
    with capsys.disabled():
        slowest = max(results[rank].value["seconds"] for rank in live)
        print(f"\n{how} before {call}: named after {slowest:.2f} s by all of {live} (bound {BOUND:g} s)")
    if how == "stop":
        assert results[lost].value["missing"] == [lost]


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_lost_rank_in_groups_of_other_sizes(how, size):
    results, lost, live = _lose(how, "all_reduce", size)
    assert [results[rank].value["missing"] for rank in live] == [[lost]] * len(live)
    assert [results[rank].value["sum"] for rank in live] == [[size - 1.0] * 2] * len(live)


@pytest.mark.parametrize("who", [0, 1, None])
def test_ranks_that_end_without_a_result_fail_the_command_and_are_said(who, capsys):
    assert run(Place("own", 0, 2), targets.leave_without_a_word, who) == 1
    said = capsys.readouterr().err.splitlines()
    gone = [0, 1] if who is None else [who]
    assert said == [f"rank {rank} ended with exit code 3 before it had a result" for rank in gone]


def test_a_late_rank_within_the_bound_is_no_failure():
    results = run_ranks(SIZE, targets.straggle, 2.0)
    assert [result.value for result in results] == [([4.0] * 3, True)] * SIZE


def test_different_calls_without_checked_mode_end_on_every_rank():
    results = run_ranks(SIZE, targets.mismatch_unchecked, fail_fast_s=20)
    assert [result.value["missing"] for result in results] == [[LOST]] * SIZE
    assert len({result.value["text"] for result in results}) == 1


def test_an_environment_that_differs_on_one_rank_is_refused_by_all():
    results = run_ranks(SIZE, targets.environment_on_one, env={1: {"DSV41_COMM_TIMEOUT_S": "77"}})
    for result in results:
        assert result.value["error"] == "DisagreementError"
        assert "77.0" in result.value["said"][1]
        assert "rank 1 said" in result.value["text"]
    assert len({result.value["text"] for result in results}) == 1


@pytest.mark.parametrize("where", ["start", "later"])
def test_an_exception_on_one_rank_ends_the_group_and_leaves_nobody(where):
    started = time.monotonic()
    with RankSet(SIZE, targets.raise_on_one, (where,)) as ranks:
        results = ranks.wait(60, fail_fast_s=1.0)
        pids = [ranks.pid(rank) for rank in range(SIZE)]
    assert time.monotonic() - started < 60
    assert results[1].error.startswith("ValueError: broken")
    assert results[1].exitcode == 1
    assert not [pid for pid in pids if _alive(pid)]


STARTER = """
import time
from dsv41_dist.cli.spawn import RankSet
from tests.multirank import targets
with RankSet(2, targets.straggle, (600.0,)) as ranks:
    print(ranks.pid(0), ranks.pid(1), flush=True)
    time.sleep(600)
"""


def test_no_rank_outlives_its_starter():
    starter = subprocess.Popen([sys.executable, "-c", STARTER], stdout=subprocess.PIPE, text=True)
    pids = [int(pid) for pid in starter.stdout.readline().split()]
    assert len(pids) == 2
    assert all(_alive(pid) for pid in pids)
    starter.send_signal(signal.SIGKILL)
    starter.wait()
    deadline = time.monotonic() + 10
    while any(_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [pid for pid in pids if _alive(pid)]


@pytest.mark.parametrize("size", [8, 16])
def test_the_largest_groups(size):
    results = run_ranks(size, targets.every_reduction)
    assert [result.value for result in results] == [(0, False, 0)] * size


def test_many_calls_leak_no_file_no_thread_and_no_memory():
    for result in run_ranks(2, targets.soak, 2000):
        (files, threads, rss), (files_after, threads_after, rss_after) = result.value
        assert (files_after, threads_after) == (files, threads)
        assert rss_after - rss < 8 * 1024  # KiB


def _alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
