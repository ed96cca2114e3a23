"""Groups in which ranks begin unequal, and communicators at the end of their life."""

import pytest

from dsv41_dist.cli.spawn import run_ranks
from dsv41_dist.comm import ArgumentError, Route, RouteTable

from . import edge_targets


def values(results):
    assert [result.error for result in results] == [None] * len(results), [result.trace for result in results]
    return [result.value for result in results]


def test_ranks_in_different_numbers_of_torch_groups_come_together():
    results = values(run_ranks(3, edge_targets.other_numbers_of_groups, fail_fast_s=60))
    assert results == [[3.0] * 4 + [2.0] * 2, [3.0] * 4, [3.0] * 4 + [2.0] * 2]


def test_a_log_folder_that_one_rank_cannot_write_is_refused_by_all_at_once():
    env = {0: {"DSV41_COMM_LOG": "/proc/nope"}}
    (said, took), (other, other_took) = values(run_ranks(2, edge_targets.log_folder, env=env))
    assert said == other
    assert said[0] == "ArgumentError"
    assert "DSV41_COMM_LOG='/proc/nope' on rank 0" in said[1]
    assert max(took, other_took) < 5


def test_text_that_is_no_utf8_is_compared_and_sent_like_any_other():
    for differs, same, sent in values(run_ranks(2, edge_targets.other_encodings)):
        assert differs is not None
        assert differs[0] == "DisagreementError"
        assert same
        assert sent


def test_a_table_that_no_call_could_follow_is_refused_on_every_rank():
    for found in values(run_ranks(2, edge_targets.wrong_tables)):
        assert found["fallback"][0] == found["routed"][0] == "ArgumentError"
        assert "fallback='peer': allowed is process_group" in found["fallback"][1]
        assert "fallback='peer': allowed is process_group" in found["routed"][1]
        assert found["empty"] == ("ArgumentError", "all_reduce op='': allowed is sum, prod, min, max")
        assert found["empty of bool"][0] == "ArgumentError"
        assert found["sum"] == [2.0] * 3


def test_a_transport_that_does_not_exist_is_refused_by_name():
    with pytest.raises(ArgumentError, match="route over 'peeer': allowed is"):
        RouteTable("process_group", (Route("all_reduce", None, "peeer"),))
    with pytest.raises(ArgumentError, match="route over 'gloo': allowed is"):
        RouteTable("gloo")


def test_a_closed_communicator_says_so_at_once_and_holds_nothing(tmp_path):
    for errors, took, held in values(run_ranks(2, edge_targets.closed, str(tmp_path))):
        assert [error[0] for error in errors] == ["TransportError"] * 3
        assert all("closed on this rank by close()" in error[1] for error in errors)
        assert took < 1
        assert held == 0


def test_votes_leave_nothing_in_the_store():
    for first, then in values(run_ranks(2, edge_targets.votes, 50)):
        assert then - first < 5
