"""Decisions are uniform, whatever one rank does; checked mode refuses on every rank and the group goes on."""

import json
import re
import warnings
from typing import Any

import pytest
import torch

from dsv41_dist.comm import (
    CommSettings,
    Communicator,
    DisagreementError,
    MismatchError,
    Ranks,
    Route,
    RouteTable,
    SelfCheck,
    Split,
    Transport,
    first_difference,
)
from dsv41_dist.comm import establish as establishing
from dsv41_dist.comm.patterns import reduce_expected, reduce_pattern, wrong_elements
from dsv41_dist.comm.transports.flipped import FlippedTransport
from dsv41_dist.comm.transports.process_group import ProcessGroupTransport


def still_works(comm):
    comm.barrier(label="after")
    x = reduce_pattern((6, 7), torch.bfloat16, 1, comm.ranks.rank)
    got = comm.all_reduce(x, label="after")
    return wrong_elements(got, reduce_expected((6, 7), torch.bfloat16, 1, comm.ranks.size)) == 0


def test_agree_is_the_and_over_ranks(comm):
    size, rank = comm.ranks.size, comm.ranks.rank
    assert comm.agreement.agree(True, label="a") is True
    for no in range(size):
        assert comm.agreement.agree(rank != no, label="a") is False
    assert comm.agreement.agree_min(100 - rank, label="m") == 101 - size
    assert comm.agreement.agree_min(-(2**62), label="m") == -(2**62)


@pytest.mark.parametrize("bad", [None, 1, "yes"])
def test_one_rank_that_cannot_vote_stops_all_and_is_named(comm, bad):
    last = comm.ranks.size - 1
    with pytest.raises(DisagreementError) as caught:
        comm.agreement.agree(bad if comm.ranks.rank == last else True, label="vote")
    assert list(caught.value.said) == [last]
    assert repr(bad) in str(caught.value)
    with pytest.raises(DisagreementError):
        comm.agreement.agree_min(2**63 if comm.ranks.rank == last else 1, label="vote")
    assert still_works(comm)


def test_same_everywhere_lists_who_said_what(comm):
    size, rank = comm.ranks.size, comm.ranks.rank
    assert comm.agreement.same_everywhere({"b": [1, 2], "a": "é"}, label="s") == {"b": [1, 2], "a": "é"}
    if size > 1:
        with pytest.raises(DisagreementError) as caught:
            comm.agreement.same_everywhere({"gate": "x" if rank == size - 1 else "off"}, label="s")
        assert caught.value.said[size - 1] == '{"gate": "x"}'
        assert caught.value.said[0] == '{"gate": "off"}'
        assert f"rank {size - 1} said" in str(caught.value)
    assert still_works(comm)


@pytest.mark.parametrize("nothing", [None, "", [], {}])
def test_agreement_on_nothing_is_none(comm, nothing):
    with pytest.raises(DisagreementError, match="every rank says nothing"):
        comm.agreement.same_everywhere(nothing, label="nothing")
    assert still_works(comm)


def test_a_value_that_cannot_be_compared_is_refused_everywhere(comm):
    with pytest.raises(DisagreementError, match="cannot be compared"):
        comm.agreement.same_everywhere(object() if comm.ranks.rank == 0 else 1, label="s")
    assert comm.agreement.gather({"r": comm.ranks.rank}, label="g") == [{"r": r} for r in range(comm.ranks.size)]
    with pytest.raises(DisagreementError, match="cannot be sent"):
        comm.agreement.gather(object() if comm.ranks.rank == 0 else 1, label="g")
    assert still_works(comm)


def test_votes_for_different_things_do_not_mix(comm):
    if comm.ranks.size == 1:
        pytest.skip("needs a second rank")
    last = comm.ranks.size - 1
    with pytest.raises(MismatchError) as caught:
        comm.agreement.agree(True, label="gate_b" if comm.ranks.rank == last else "gate_a")
    assert caught.value.fields == ("label",)
    assert "gate_b" in caught.value.said[last]
    vote = (
        (lambda: comm.agreement.agree_min(1, label="gate"))
        if comm.ranks.rank == last
        else (lambda: comm.agreement.agree(True, label="gate"))
    )
    with pytest.raises(MismatchError, match="kind differ"):
        vote()
    assert still_works(comm)


def test_self_check_is_on_everywhere_or_nowhere(comm):
    last = comm.ranks.size - 1
    check = SelfCheck(comm.agreement, "layer")
    x = torch.arange(6.0)
    stock = lambda v: v * 2  # noqa: E731
    check.run("good", stock, lambda v: v + v, x)
    check.run("bad", stock, lambda v: v * (3 if comm.ranks.rank == last else 2), x)
    assert (check.verdict("good"), check.verdict("bad")) == (True, False)
    assert re.fullmatch(rf"rank {last}: input 0: \d+ of 24 bytes differ", check.reasons["bad"])

    def breaks(v):
        if comm.ranks.rank == last:
            raise ValueError("no kernel")
        return v * 2

    check.run("raises", stock, breaks, x)
    assert check.verdict("raises") is False
    assert check.reasons["raises"] == f"rank {last}: input 0: the fast path raised ValueError: no kernel"
    check.run("all", stock, lambda v: v.double(), x)
    assert [part.split(":")[0] for part in check.reasons["all"].split("; ")] == [f"rank {r}" for r in range(last + 1)]
    assert still_works(comm)


MISTAKES = {
    "wrong reduce op": (lambda c, x, odd: c.all_reduce(x, "min" if odd else "sum", label="a"), ("redop",)),
    "wrong dtype": (lambda c, x, odd: c.all_reduce(x.double() if odd else x, label="a"), ("dtype",)),
    "wrong shape": (lambda c, x, odd: c.all_reduce(x[:2] if odd else x, label="a"), ("shape",)),
    "same bytes, other shape": (lambda c, x, odd: c.all_reduce(x.view(-1) if odd else x, label="a"), ("shape",)),
    "wrong operation": (lambda c, x, odd: c.all_gather(x, label="a") if odd else c.all_reduce(x, label="a"), ("kind",)),
    "wrong dim": (lambda c, x, odd: c.all_gather(x, 1 if odd else 0, label="a"), ("dim",)),
    "wrong source": (lambda c, x, odd: c.broadcast(x, 1 if odd else 0, label="a"), ("src",)),
    "exact on one rank": (lambda c, x, odd: c.reduce_scatter(x, exact=odd, label="a"), ("exact",)),
    "barrier against data": (lambda c, x, odd: c.barrier(label="a") if odd else c.all_reduce(x, label="a"), ("kind",)),
    "vote against data": (
        lambda c, x, odd: c.agreement.agree(True, label="a") if odd else c.all_reduce(x, label="a"),
        ("kind",),
    ),
    "swapped calls": (lambda c, x, odd: c.all_reduce(x, label="second" if odd else "first"), ("label",)),
    "other split": (lambda c, x, odd: _columns(c, x, odd), ("split",)),
}


def _columns(comm, x, odd):
    # The last rank believes in one column more of rank 0's; its own shard is the same.
    sizes = (4 if odd else 3, *[3] * (comm.ranks.size - 1))
    split = Split(sum(sizes), sizes)
    part = torch.zeros(2, split.size(comm.ranks.rank))
    return comm.all_gather_columns(part, split, label="a")


@pytest.mark.parametrize("mistake", MISTAKES)
def test_checked_mode_refuses_on_every_rank_and_the_group_goes_on(checked, mistake):
    if checked.ranks.size == 1:
        pytest.skip("needs a second rank")
    call, fields = MISTAKES[mistake]
    last = checked.ranks.size - 1
    x = torch.ones(4 * checked.ranks.size, 3)
    with pytest.raises(MismatchError) as caught:
        call(checked, x, checked.ranks.rank == last)
    assert set(fields) <= set(caught.value.fields)
    odd, usual = caught.value.said[last], caught.value.said[0]
    assert odd != usual
    assert f"rank {last} said {odd}" in str(caught.value)
    assert x.eq(1).all()
    assert still_works(checked)


def test_checked_mode_lets_right_calls_through(checked):
    assert still_works(checked)
    x = byte = torch.ones(2, 3 + checked.ranks.rank)
    split = Split(sum(3 + r for r in range(checked.ranks.size)), tuple(3 + r for r in range(checked.ranks.size)))
    assert checked.all_gather_columns(byte, split, label="c").shape == (2, split.n)
    assert checked.all_gather_rows(x.t().contiguous(), split, label="r").shape == (split.n, 2)


def test_a_skipped_call_is_seen_at_the_next_one_and_the_count_is_mended(checked):
    if checked.ranks.size == 1:
        pytest.skip("needs a second rank")
    last = checked.ranks.size - 1
    # The last rank goes on to step 2 without step 1.
    step = "step_2" if checked.ranks.rank == last else "step_1"
    with pytest.raises(MismatchError) as caught:
        checked.all_reduce(torch.ones(3), label=step)
    assert "step_2" in caught.value.said[last]
    assert "step_1" in caught.value.said[0]
    assert still_works(checked)
    assert len(set(checked.agreement.gather(checked._watch.seq, label="seq"))) == 1


@pytest.mark.parametrize("step", ["probe", "construct", "allocate", "attach"])
def test_a_transport_connects_on_all_ranks_or_on_none(comm, step):
    if comm.ranks.kind != "torch":
        pytest.skip("the broken transport is one of torch's")
    last = comm.ranks.size - 1
    odd = comm.ranks.rank == last

    class Broken(ProcessGroupTransport):
        name = "broken"

        def __init__(self, ranks, watch):
            super().__init__(ranks, watch)
            if odd and step == "construct":
                raise OSError("no such card")

        @classmethod
        def probe(cls, ranks):
            return "no card here: plug one in" if odd and step == "probe" else None

        def allocate(self):
            if odd and step == "allocate":
                raise MemoryError("no memory")
            return b"blob of rank %d" % self.ranks.rank

        def attach(self, blobs):
            assert list(blobs) == [b"blob of rank %d" % r for r in range(self.ranks.size)]
            if odd and step == "attach":
                raise RuntimeError("cannot open")

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        got = establishing.connect("broken", lambda: Broken, comm.ranks, comm._watch, comm._control, comm.agreement)
    assert got is None
    said = [str(w.message) for w in seen if "is used by no rank" in str(w.message)]
    assert len(said) == (comm.ranks.rank == 0)
    if said:
        assert f"rank {last}: " in said[0]
    assert still_works(comm)


def test_a_sound_transport_connects(comm):
    if comm.ranks.kind != "torch":
        pytest.skip("one of torch's")
    got = establishing.connect(
        "pg", lambda: ProcessGroupTransport, comm.ranks, comm._watch, comm._control, comm.agreement
    )
    assert isinstance(got, Transport)


def test_different_settings_on_one_rank_are_refused_by_all(ranks):
    if ranks.size == 1:
        pytest.skip("needs a second rank")
    odd = ranks.rank == ranks.size - 1
    with pytest.raises(DisagreementError, match=f"rank {ranks.size - 1} said"):
        Communicator.create(ranks, settings=CommSettings(timeout_s=21 if odd else 20))


def test_the_caller_s_default_device_is_not_ours(ranks):
    """An engine loads its model under `torch.device`: what we keep on the host must not follow it."""
    x = torch.full((4, 2), float(ranks.rank + 1))
    with torch.device("meta"):
        comm = Communicator.create(ranks, settings=CommSettings(timeout_s=20, check=True))
        assert comm.agreement.agree(True, label="yes")
        assert comm.agreement.same_everywhere({"a": 1}, label="same") == {"a": 1}
        assert comm.agreement.gather(ranks.rank, label="who") == list(range(ranks.size))
        total = comm.all_reduce(x, label="sum")
        rows = comm.all_gather(x, 1, label="rows")
        comm.close()
    assert total.flatten().tolist() == [ranks.size * (ranks.size + 1) / 2] * 8
    assert rows[0].tolist() == [float(rank + 1) for rank in range(ranks.size) for _ in range(2)]


def test_a_group_with_a_backend_for_each_kind_of_device(ranks):
    if ranks.kind != "torch":
        pytest.skip("one of torch's")
    group: Any = torch.distributed.new_group(backend="cpu:gloo")
    comm = Communicator.create(Ranks.from_torch(group))
    assert comm.ranks.device.type == "cpu"
    assert still_works(comm)
    comm.close()


def test_the_same_communicator_with_other_routes(comm, checked):
    for one in (comm, checked):
        fallback = one.table.fallback
        other = one.routed(
            RouteTable(fallback, (Route("all_gather", 64, fallback), Route("all_gather", 8, "peer"))), label="o"
        )
        assert [route.transport for route in other.table.routes] == [fallback]  # peer is not connected
        assert (type(other), other.transports, other.closed) == (type(one), one.transports, False)
        assert other.all_reduce(torch.ones(2), label="sum").tolist() == [float(comm.ranks.size)] * 2
        assert one.all_reduce(torch.ones(2), label="sum").tolist() == [float(comm.ranks.size)] * 2
    if comm.ranks.size > 1:
        odd = comm.ranks.rank == comm.ranks.size - 1
        with pytest.raises(DisagreementError, match="routes:table"):
            comm.routed(
                RouteTable(comm.table.fallback, (Route("all_gather", 9 if odd else 8, comm.table.fallback),)),
                label="routes",
            )
    assert still_works(comm)


def test_a_flipped_byte_is_seen(comm):
    if comm.ranks.size == 1:
        pytest.skip("needs a second rank")
    flipped = FlippedTransport(comm.transports[comm.table.fallback], comm.ranks.size - 1)
    x = torch.zeros(4, dtype=torch.bfloat16)
    out = torch.empty(4 * comm.ranks.size, dtype=torch.bfloat16)
    flipped.all_gather_rows(x, out)
    assert wrong_elements(out, torch.zeros_like(out)) == 1


def test_the_decision_log_shows_the_first_difference(ranks, tmp_path_factory, comm):
    if ranks.size == 1:
        pytest.skip("needs a second rank")
    folder = comm.agreement.gather(str(tmp_path_factory.mktemp("log")), label="folder")[0]
    logged = Communicator.create(ranks, settings=CommSettings(timeout_s=20, log_dir=folder))
    logged.all_reduce(torch.ones(3), label="one")
    logged.agreement.agree(True, label="two")
    logged.barrier(label="end")
    comm.barrier(label="written")
    assert first_difference(folder) is None
    comm.barrier(label="read")
    odd = ranks.rank == ranks.size - 1
    logged.all_reduce(torch.ones(3), label="mine" if odd else "three")  # the same bytes: nothing else would notice
    logged.barrier(label="end")
    comm.barrier(label="written")
    found = first_difference(folder)
    assert json.dumps(found["said"][ranks.size - 1]).count("mine") == 1
    assert found["said"][0]["label"] == "three"
    comm.barrier(label="read")
    logged.close()


def test_one_group_many_communicators(ranks):
    made = [Communicator.create(ranks) for _ in range(3)]
    assert len({c._watch.name for c in made}) == 3
    assert all(still_works(c) for c in made)
    for c in made:
        c.close()
