"""The comparison of two boots, on made-up outcomes: it must find whatever differs."""

from __future__ import annotations

import copy

import pytest

from dsv41_dist.rehearsal.report import judge, text
from dsv41_dist.rehearsal.verdict import Outcome, compare


def outcome(name: str = "stock") -> Outcome:
    forward = {"mode": "DECODE", "draft": False, "rows": 2, "requests": 2, "collectives": {"all_reduce": 3}}
    forwards = [{**forward, "logits": [f"a{i}", f"b{i}"], "top": [[5, 9.0, 8.0], [6, 7.0, 6.0]]} for i in range(3)]
    stage = {"name": "short", "tokens": [[1, 2, 3], [4, 5, 6]], "cached": [0, 0]}
    return Outcome(name, stages=[stage], ranks={rank: copy.deepcopy(forwards) for rank in range(4)})


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
    assert compare(outcome(), other).problems == ["tokens differ: short, prompt 0, token 2: 3 there, nothing here"]


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
    assert compare(outcome(), other, bytes_must_match=False).problems == []


def test_a_rank_of_its_own_mind_is_named():
    other = outcome("adapted")
    other.ranks[2][1]["logits"][0] = "x"
    assert compare(outcome(), other).problems == ["logits of rank 2 differ from rank 0's at forward 1 (DECODE)"]
    other = outcome("adapted")
    other.ranks[3].pop()
    assert compare(outcome(), other).problems == ["rank 3 made 2 forwards, rank 0 3"]


@pytest.mark.parametrize("change", [{"rows": 3}, {"mode": "EXTEND"}, {"draft": True}, {"requests": 1}])
def test_other_batches_are_a_problem(change):
    other = outcome("adapted")
    for entries in other.ranks.values():
        entries[0].update(change)
    (problem,) = compare(outcome(), other).problems
    assert problem.startswith("the batches differ at forward 0: ")


def test_one_forward_less_on_every_rank_is_a_problem():
    other = outcome("adapted")
    for entries in other.ranks.values():
        entries.pop()
    assert compare(outcome(), other).problems == ["3 forwards there, 2 here"]


def reported(state: str) -> Outcome:
    adapted = outcome("adapted")
    entry = {"adapter": "some", "state": state, "guarantee": "bit-identical", "patched": ["m:f"], "fired": 0}
    adapted.boot_report = {"ranks": 4, "adapters": [entry]}
    return adapted


@pytest.mark.parametrize(
    ("state", "must_fire", "problems", "notes"),
    [
        ("fired", True, 0, 0),
        ("native", True, 0, 0),
        ("installed", False, 0, 1),
        ("never fired", False, 0, 1),
        ("installed", True, 1, 0),
        ("armed", False, 1, 0),
    ],
)
def test_the_state_of_an_adapter_decides(state, must_fire, problems, notes):
    found = judge([outcome(), reported(state)], None, ["some"], must_fire)
    assert (len(found[0]), len(found[1])) == (problems, notes)


def test_an_adapter_missing_from_the_report_is_a_problem():
    assert judge([outcome(), reported("fired")], None, ["other"], False)[0] == ["other: not in the boot report"]


def test_the_last_line_is_the_verdict():
    boots = [outcome(), reported("fired")]
    good = text(boots, compare(*boots), [], [], "head", 12.0)
    assert good.splitlines()[-1] == "READY: 2 boot(s), 12 s"
    assert "block_fp8_linear" in good
    bad = text(boots, None, ["lost rank 2"], [], "head", 12.0)
    assert bad.splitlines()[-2:] == ["- lost rank 2", "NOT READY: 2 boot(s), 12 s"]
