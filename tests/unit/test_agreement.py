"""What needs no second rank: byte comparison, self checks, settings, errors, who is missing."""

import math

import pytest
import torch

from dsv41_dist.comm import (
    CommSettings,
    MismatchError,
    Ranks,
    RankTimeout,
    Route,
    RouteTable,
    SelfCheck,
    SettingsError,
    TransportError,
    same_bytes,
)
from dsv41_dist.comm.beacon import decide_missing, error_from
from dsv41_dist.comm.errors import ArgumentError, describe_said
from dsv41_dist.comm.ranks import host_identity


class Alone:
    """Agreement of a group of one, with the answers of others made up."""

    def __init__(self, others=True):
        self.others, self.asked = others, []

    def agree(self, flag, *, label):
        self.asked.append((flag, label))
        return flag and self.others

    def gather(self, value, *, label):
        return [value, "" if self.others else "input 0: 1 of 4 bytes differ"]


def test_same_bytes_sees_what_values_hide():
    x = torch.tensor([0.0, float("nan")])
    assert same_bytes(x, x.clone()) is None
    assert "bytes differ" in same_bytes(x, torch.tensor([-0.0, float("nan")]))
    payload = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert same_bytes(payload, torch.tensor([math.nan])) is not None
    assert "float32" in same_bytes(x, x.double())
    assert same_bytes((x, None, 3), (x, None, 3)) is None
    assert "output 1" in same_bytes((x, x), (x, x + 1))
    assert same_bytes((x,), (x, x)) == "1 outputs against 2"
    assert same_bytes(x.t(), x.clone()) is None
    assert same_bytes(3, 4) == "3 against 4"


def test_self_check_locks_the_verdict_of_the_first_eager_call():
    agreement = Alone()
    check = SelfCheck(agreement, "layer")
    calls = []
    stock = lambda x: calls.append("stock") or x * 2  # noqa: E731
    fast = lambda x: calls.append("fast") or x + x  # noqa: E731
    x = torch.ones(3)
    assert check.run(("l", 6), stock, fast, x, capturing=True) is not None
    assert calls == ["stock"]
    assert check.verdict(("l", 6)) is None
    check.run(("l", 6), stock, fast, x, probes=[(x + 1,)])
    assert calls[1:] == ["stock", "fast", "stock", "fast"]
    assert check.verdict(("l", 6)) is True
    check.run(("l", 6), stock, fast, x, capturing=True)
    assert calls[-1] == "fast"
    assert agreement.asked == [(True, "self_check:layer:('l', 6)")]


@pytest.mark.parametrize(
    ("fast", "reason"),
    [
        (lambda x: x * 2 + 1, "bytes differ"),
        (lambda x: (x * 2).double(), "float64"),
        (lambda x: 1 / 0, "the fast path raised ZeroDivisionError"),
    ],
)
def test_self_check_keeps_stock_where_fast_differs(fast, reason):
    check = SelfCheck(Alone(), "layer")
    x = torch.ones(3)
    assert torch.equal(check.run("k", lambda x: x * 2, fast, x), x * 2)
    assert check.verdict("k") is False
    assert reason in check.reasons["k"]
    assert torch.equal(check.run("k", lambda x: x * 2, fast, x), x * 2)


def test_self_check_follows_the_other_ranks():
    check = SelfCheck(Alone(others=False), "layer")
    check.run("k", lambda x: x, lambda x: x, torch.ones(1))
    assert check.verdict("k") is False
    assert check.reasons["k"] == "rank 1: input 0: 1 of 4 bytes differ"


def test_self_check_votes_before_it_raises_what_stock_raised():
    agreement = Alone()
    with pytest.raises(ZeroDivisionError):
        SelfCheck(agreement, "layer").run("k", lambda x: 1 / 0, lambda x: x, torch.ones(1))
    assert agreement.asked[0][0] is False


@pytest.mark.parametrize("fails", ["stock", "fast"])
def test_a_vote_that_fails_after_a_path_did_names_its_cause(fails):
    def lost(flag, *, label):
        raise TransportError("missing")

    def works(x):
        return x

    def breaks(x):
        raise MemoryError("no room")

    agreement = Alone()
    agreement.agree = lost
    paths = [breaks if fails == name else works for name in ("stock", "fast")]
    with pytest.raises(TransportError, match="missing") as caught:
        SelfCheck(agreement, "layer").run("k", *paths, torch.ones(1))
    assert isinstance(caught.value.__cause__, MemoryError)
    with pytest.raises(TransportError) as caught:
        SelfCheck(agreement, "layer").run("k", works, works, torch.ones(1))
    assert caught.value.__cause__ is None


def test_settings_defaults_and_values():
    assert CommSettings.from_env({}) == CommSettings(300.0, 100.0, 0.25, False, None)
    env = {"DSV41_COMM_TIMEOUT_S": "7.5", "DSV41_COMM_CHECK": "on", "DSV41_COMM_LOG": "/x"}
    settings = CommSettings.from_env(env)
    assert (settings.timeout_s, settings.check, settings.log_dir) == (7.5, True, "/x")
    assert "log_dir" not in settings.digest_fields()


def test_the_heartbeat_fits_the_bounds():
    assert CommSettings.from_env({"DSV41_COMM_TIMEOUT_S": "0.4"}).heartbeat_s == 0.1
    for bound in ("DSV41_COMM_TIMEOUT_S", "DSV41_COMM_INIT_TIMEOUT_S"):
        with pytest.raises(SettingsError, match=f"DSV41_COMM_HEARTBEAT_S=6: allowed .*{bound}=1 "):
            CommSettings.from_env({bound: "1", "DSV41_COMM_HEARTBEAT_S": "6"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DSV41_COMM_TIMEOUT_S", "soon"),
        ("DSV41_COMM_TIMEOUT_S", "0"),
        ("DSV41_COMM_TIMEOUT_S", "nan"),
        ("DSV41_COMM_INIT_TIMEOUT_S", "-1"),
        ("DSV41_COMM_HEARTBEAT_S", "1e9"),
        ("DSV41_COMM_CHECK", "yes please"),
    ],
)
def test_a_bad_setting_names_variable_value_and_what_is_allowed(name, value):
    with pytest.raises(SettingsError) as caught:
        CommSettings.from_env({name: value})
    assert name in str(caught.value)
    assert value in str(caught.value)
    assert "allowed" in str(caught.value)


def test_equal_answers_are_folded():
    assert describe_said({0: "a", 1: "a", 2: "b"}) == "ranks 0,1 said a; rank 2 said b"
    assert "label differ" in str(MismatchError("x", {0: "a", 1: "b"}, ["label"]))


def test_routes_by_size_with_the_fallback_last():
    table = RouteTable("process_group", (Route("all_reduce", None, "roce"), Route("all_reduce", 1024, "peer")))
    assert table.candidates("all_reduce", 1024) == ["peer", "roce", "process_group"]
    assert table.candidates("all_reduce", 1025) == ["roce", "process_group"]
    assert table.candidates("broadcast", 1) == ["process_group"]
    some = table.restricted(["process_group", "peer"])
    assert some.candidates("all_reduce", 1) == ["peer", "process_group"]
    assert table.digest() != some.digest()
    with pytest.raises(ArgumentError, match="all_swim"):
        RouteTable("x", (Route("all_swim", 1, "a"),))


@pytest.mark.parametrize(("rank", "size", "text"), [(0, 17, "world size 17"), (4, 4, "rank 4 of 4"), (0, 0, "size 0")])
def test_ranks_refuses_nonsense(rank, size, text):
    with pytest.raises(ArgumentError, match=text):
        Ranks(rank, size, torch.device("cpu"), None, None, None)


ME = Ranks(0, 4, torch.device("cpu"), None, None, None)


def _records(**changes):
    identity = host_identity()
    base = {"label": "a", "seq": 5, "beat": 1, "table": identity.table, "pid": identity.pid, "host": identity.host}
    records = {rank: dict(base) for rank in range(4)}
    for name, change in changes.items():
        records[int(name[1:])].update(change)
    return records


def test_a_rank_that_is_behind_is_missing():
    now = _records(r3={"seq": 4, "label": "before"})
    verdict = decide_missing(ME, now, now, "no answer", "a", 5)
    assert (verdict["missing"], verdict["states"]) == ([3], {"3": "alive"})
    error = error_from(verdict)
    assert isinstance(error, RankTimeout)
    assert "missing in 'a' #5: rank 3 (alive, last reached 'before' #4)" in str(error)
    assert error.reached[3] == ("before", 4)


def test_a_dead_process_is_missing_though_it_came():
    now = _records(r2={"pid": 2**22 + 5})
    assert decide_missing(ME, now, now, "x", "a", 5)["states"] == {"2": "dead"}


def test_a_rank_of_another_host_that_is_silent_is_missing():
    silent = {"host": "elsewhere", "beat": 9}
    assert decide_missing(ME, _records(r1=silent), _records(r1=silent), "x", "a", 5)["states"] == {"1": "silent"}
    moved = {"host": "elsewhere", "beat": 10}
    assert decide_missing(ME, _records(r1=silent), _records(r1=moved), "x", "a", 5)["missing"] == []


def test_a_rank_that_never_said_anything_is_missing():
    now = _records()
    del now[1]
    verdict = decide_missing(ME, now, now, "x", "a", 5)
    assert verdict["missing"] == [1]
    assert "rank 1 (unknown, last reached nothing yet)" in str(error_from(verdict))


def test_the_rank_in_another_call_is_missing_from_this_one():
    now = _records(r3={"label": "b"})
    assert decide_missing(ME, now, now, "x", "b", 5)["missing"] == [3]
    # A draw is decided for rank 0's side, whoever looks.
    now = _records(r2={"label": "b"}, r3={"label": "b"})
    assert decide_missing(ME, now, now, "x", "b", 5)["missing"] == [2, 3]


def test_what_a_transport_saw_itself_counts():
    now = _records()
    verdict = decide_missing(ME, now, now, "not on the device", "replay", 5, absent=[2])
    assert (verdict["missing"], verdict["states"]) == ([2], {"2": "alive"})
    assert isinstance(error_from(verdict), RankTimeout)


def test_nobody_missing_is_a_failure_of_the_transport():
    verdict = decide_missing(ME, _records(), _records(), "odd", "a", 5)
    error = error_from(verdict)
    assert isinstance(error, TransportError)
    assert "every rank is alive" in str(error)
