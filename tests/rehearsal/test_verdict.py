"""The comparison of two boots, on made-up outcomes: it must find whatever differs."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest

from dsv41_dist.rehearsal.report import judge, text
from dsv41_dist.rehearsal.verdict import Outcome, compare


def outcome(name: str = "stock") -> Outcome:
    forward = {"mode": "DECODE", "draft": False, "rows": 2, "requests": 2, "collectives": {"all_reduce": 3}}
    forwards = [{**forward, "logits": [f"a{i}", f"b{i}"], "top": [[5, 9.0, 8.0], [6, 7.0, 6.0]]} for i in range(3)]
    forwards[0]["mode"] = "EXTEND"
    stage = {"name": "short", "sampled": False, "tokens": [[1, 2, 3], [4, 5, 6]], "cached": [0, 0], "new_tokens": 3}
    return Outcome(name, 4, stages=[stage], ranks={rank: copy.deepcopy(forwards) for rank in range(4)})


def test_equal_boots_have_no_problem():
    found = compare(outcome(), outcome("adapted"))
    assert (found.tokens_equal, found.logits_equal, found.forwards, found.problems) == (True, True, 3, [])


def test_one_other_token_is_named():
    other = outcome("adapted")
    other.stages[0]["tokens"][1][2] = 7
    found = compare(outcome(), other)
    assert not found.tokens_equal
    assert found.problems == ["tokens differ: short, prompt 1, token 2: 6 there, 7 here"]


def test_missing_tokens_are_named():
    other = outcome("adapted")
    other.stages[0]["tokens"][0].pop()
    assert compare(outcome(), other).problems == [
        "adapted: short, prompt 0: 2 tokens of 3",
        "tokens differ: short, prompt 0, token 2: 3 there, nothing here",
    ]


def test_other_cached_rows_are_named():
    other = outcome("adapted")
    other.stages[0]["cached"] = [256, 0]
    assert compare(outcome(), other).problems == ["cached rows differ: short: [0, 0] there, [256, 0] here"]


def test_one_row_of_other_bytes_is_named_with_its_difference():
    other = outcome("adapted")
    for entries in other.ranks.values():
        entries[1]["logits"][1] = "x"
        entries[1]["top"][1] = [6, 7.25, 6.0]
    found = compare(outcome(), other)
    assert (found.tokens_equal, found.logits_equal, found.largest_difference) == (True, False, 0.25)
    assert found.problems == ["logits bytes differ first at forward 1 (DECODE, 2 rows), row 1"]
    assert compare(outcome(), other, exact=False).problems == []


def test_where_drafts_may_differ_sampled_text_is_free_and_prefill_is_not():
    stock, other = outcome(), outcome("adapted")
    for boot in (stock, other):
        boot.stages[0]["sampled"] = True
    other.stages[0]["tokens"][1][2] = 7
    for entries in other.ranks.values():
        entries[2]["rows"] = 3  # another batch, after other drafts
    assert compare(stock, other, exact=False).problems == []
    assert len(compare(stock, other).problems) == 2
    other.stages[0]["tokens"][1].append(8)
    assert "tokens differ: short, prompt 1, token 2: 6 there, 7 here" in compare(stock, other, exact=False).problems
    other.stages[0]["tokens"][1].pop()
    for entries in other.ranks.values():
        entries[0]["logits"][1] = "x"
    found = compare(stock, other, exact=False)
    assert not found.prefill_equal
    assert found.problems == ["in prefill: logits bytes differ first at forward 0 (EXTEND, 2 rows), row 1"]


def test_a_rank_of_its_own_mind_is_named():
    other = outcome("adapted")
    other.ranks[2][1]["logits"][0] = "x"
    said = "rank 2's logits bytes differ from rank 0's at forward 1 (DECODE)"
    assert compare(outcome(), other).problems == [f"adapted: {said}"]
    assert compare(replace(other, name="stock"), outcome("adapted")).problems == [f"stock: {said}"]
    assert compare(other, other).problems == [f"adapted: {said}"]
    other = outcome("adapted")
    other.ranks[3].pop()
    assert compare(outcome(), other).problems == ["adapted: rank 3 made 2 forwards, rank 0 3"]


@pytest.mark.parametrize(
    "change", [{"rows": 3}, {"mode": "EXTEND"}, {"draft": True}, {"requests": 1}, {"logits": ["a"]}, {"logits": []}]
)
def test_other_batches_are_a_problem(change):
    other = outcome("adapted")
    for entries in other.ranks.values():
        entries[1].update(change)
    (problem,) = compare(outcome(), other).problems
    assert problem.startswith("the batches differ at forward 1: ")


def test_other_hidden_states_of_the_draft_are_named_as_such():
    stock, other = outcome(), outcome("adapted")
    for boot in (stock, other):
        for entries in boot.ranks.values():
            entries[1]["draft"] = True
    for entries in other.ranks.values():
        entries[1]["logits"][0] = "x"
    said = ["bytes of the draft's hidden states differ first at forward 1 (DECODE, 2 rows), row 0"]
    assert compare(stock, other).problems == said
    assert compare(stock, other, exact=False).problems == []


def test_a_forward_without_bytes_is_not_counted_as_equal():
    stock, other = outcome(), outcome("adapted")
    for boot in (stock, other):
        for entries in boot.ranks.values():
            entries[1] |= {"logits": [], "top": []}
    assert compare(stock, other).forwards == 2


def without(what: str) -> Outcome:
    boot = outcome("adapted")
    if what == "any rank":
        boot.ranks = {}
    elif what == "two ranks":
        del boot.ranks[1], boot.ranks[3]
    elif what == "prefill":
        for entries in boot.ranks.values():
            entries[0]["mode"] = "DECODE"
    elif what == "bytes":
        for entry in [entry for entries in boot.ranks.values() for entry in entries]:
            entry |= {"logits": [], "top": []}
    elif what == "answers":
        boot.stages[0]["tokens"] = [[], []]
    elif what == "stages":
        boot.stages = []
    return boot


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("any rank", "adapted: TP4, and the ranks that recorded forwards are none"),
        ("two ranks", "adapted: TP4, and the ranks that recorded forwards are 0, 2"),
        ("prefill", "adapted: no prefill was recorded"),
        ("bytes", "adapted: no prefill was recorded"),
        ("answers", "adapted: short, prompt 0: 0 tokens of 3"),
        ("stages", "adapted: no request was answered"),
    ],
)
@pytest.mark.parametrize("exact", [True, False])
def test_where_nothing_could_differ_nothing_is_ready(what, said, exact):
    boot = without(what)
    for stock in (boot, replace(without(what), name="stock")):
        assert said in compare(stock, boot, exact).problems


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_logits_that_are_no_numbers_are_a_problem_even_if_both_have_them(value):
    bad = outcome("adapted")
    bad.ranks[2][1]["top"][1] = [5, value, 8.0]
    said = "adapted: rank 2 has NaN or infinity at forward 1 (DECODE)"
    assert compare(bad, bad).problems == [said]
    assert said in compare(outcome(), bad).problems
    for entries in bad.ranks.values():
        entries[1]["top"][1] = [5, value, 8.0]
        entries[1]["logits"][1] = "x"
    assert compare(outcome(), bad).largest_difference == math.inf


def test_one_forward_less_on_every_rank_is_a_problem():
    other = outcome("adapted")
    for entries in other.ranks.values():
        entries.pop()
    assert compare(outcome(), other).problems == ["3 forwards there, 2 here"]


def reported(state: str, name: str = "some", counts: tuple[int, ...] = (0, 0, 0, 0)) -> Outcome:
    adapted = outcome("adapted")
    entry = {"adapter": name, "state": state, "guarantee": "bit-identical", "patched": ["m:f"], "fired": 0}
    entry["notes"] = ["over here: 3 calls"]
    adapted.boot_report = {"ranks": 4, "adapters": [entry]}
    adapted.fired = {name: list(counts)}
    return adapted


@pytest.mark.parametrize(
    ("state", "counts", "must_fire", "problems", "notes"),
    [
        ("fired", (1, 2, 3, 4), True, 0, 0),
        ("installed", (1, 2, 3, 4), True, 0, 0),  # the report on disk may be older than the counts
        ("fired", (1, 0, 3, 4), False, 1, 0),
        ("native", (0, 0, 0, 0), True, 0, 0),
        ("installed", (0, 0, 0, 0), False, 0, 1),
        ("never fired", (0, 0, 0, 0), False, 0, 1),
        ("installed", (0, 0, 0, 0), True, 1, 0),
        ("armed", (0, 0, 0, 0), False, 1, 0),
    ],
)
def test_the_state_of_an_adapter_decides(state, counts, must_fire, problems, notes):
    found = judge([outcome(), reported(state, counts=counts)], None, ["some"], must_fire)
    assert (len(found[0]), len(found[1])) == (problems, notes)


def test_a_rank_on_which_an_adapter_did_not_fire_is_named():
    (problem,) = judge([outcome(), reported("fired", counts=(1, 0, 3, 0))], None, ["some"], False)[0]
    assert problem == "some fired on some ranks only: never on rank 1, 3"


def test_what_cannot_fire_here_is_said_with_its_reason_and_does_not_fail():
    problems, (note,) = judge(
        [outcome(), reported("installed", "folded_result_fence")], None, ["folded_result_fence"], True
    )
    assert problems == []
    assert note.startswith("folded_result_fence is installed and cannot fire here: it wraps the accept folded into")


def test_an_adapter_missing_from_the_report_is_a_problem():
    assert judge([outcome(), reported("fired")], None, ["other"], False)[0] == ["other: not in the boot report"]


def test_the_last_line_is_the_verdict():
    boots = [outcome(), reported("fired", counts=(5, 5, 5, 5))]
    good = text(boots, compare(*boots), [], [], "head", 12.0)
    assert good.splitlines()[-1] == "READY: 2 boot(s), 12 s"
    assert "block_fp8_linear" in good
    assert "4 of 4 ranks" in good
    assert "some: over here: 3 calls" in good
    assert "tokens                  equal\n" in good
    free = text(boots, compare(*boots, exact=False), [], [], "head", 12.0)
    assert "tokens                  equal (greedy; sampled: same count only)\n" in free
    bad = text(boots, None, ["lost rank 2"], [], "head", 12.0)
    assert bad.splitlines()[-2:] == ["- lost rank 2", "NOT READY: 2 boot(s), 12 s"]


def test_an_adapter_that_the_engine_has_itself_stays_native_when_it_is_called():
    report = text([outcome(), reported("native", counts=(5, 5, 5, 5))], None, [], [], "head", 1.0)
    (line,) = [line.split() for line in report.splitlines() if line.strip().startswith("some ")]
    assert line == ["some", "native", "bit-identical", "1", "4", "of", "4", "ranks", "5"]
