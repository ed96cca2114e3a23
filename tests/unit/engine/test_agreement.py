"""What a disagreement says: each field that differs, with who said what, and every problem of every rank."""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace

import pytest

from dsv41_dist.comm import DisagreementError
from dsv41_dist.engine import refusal
from dsv41_dist.engine.agreement import Group, differences


def said(**changes):
    base = {"engine release": "0.5.23", "gates": {"DSV41_FOLDED_FENCE": True}, "gates digest": "a", "drift": []}
    return {**base, **changes}


def test_nothing_to_say_when_all_are_equal_and_well():
    assert differences([said()] * 4) == []


def test_each_differing_field_and_each_gate_by_rank():
    other = said(**{"engine release": "0.5.22", "gates": {"DSV41_DRAFT_TAU": 0.8}, "gates digest": "b"})
    assert differences([said(), other, said(), said()]) == [
        '  engine release: ranks 0,2,3 said "0.5.23"; rank 1 said "0.5.22"',
        "  DSV41_FOLDED_FENCE: ranks 0,2,3 said true; rank 1 said unset",
        "  DSV41_DRAFT_TAU: ranks 0,2,3 said unset; rank 1 said 0.8",
    ]


def test_a_digest_that_differs_alone_is_said():
    assert differences([said(), said(**{"gates digest": "b"})]) == ['  gates digest: rank 0 said "a"; rank 1 said "b"']


def test_problems_are_said_even_when_every_rank_has_the_same():
    wrong = said(drift=["x: drifted"])
    assert differences([wrong] * 2) == ["  ranks 0,1: drift: x: drifted"]
    assert differences([said(), wrong, said(refused="no")]) == ["  rank 1: drift: x: drifted", "  rank 2: refused: no"]


@pytest.fixture
def heard(monkeypatch):
    """Group.same on rank 2 of 4, comm having raised with `texts` as what was said: the refusal, or None."""
    monkeypatch.setattr(refusal, "_first", [])

    def same(texts):
        def same_everywhere(value, label):
            if texts is not None:
                raise DisagreementError(label, texts)

        communicator = SimpleNamespace(agreement=SimpleNamespace(same_everywhere=same_everywhere))
        try:
            Group(communicator, 2, 4).same(said(), label="boot:group")
        except refusal.Refusal as error:
            return error.paragraph
        return None

    return same


def test_the_group_agrees_when_comm_does(heard):
    assert heard(None) is None


def test_the_group_says_who_differs(heard):
    texts = {rank: json.dumps(said(**{"gates digest": "b"} if rank == 3 else {})) for rank in range(4)}
    assert 'gates digest: ranks 0,1,2 said "a"; rank 3 said "b"' in heard(texts)


@pytest.mark.parametrize(
    "texts",
    [
        {2: json.dumps(said())},  # the others were lost before they could say what they have
        {rank: json.dumps(said()) for rank in (0, 2, 3)},
        {rank: json.dumps(said()) for rank in range(4)},  # comm saw a difference that the fields do not show
        dict.fromkeys(range(4), "no JSON"),
    ],
)
def test_a_disagreement_is_refused_whatever_is_known_of_it(heard, texts):
    assert "did not agree at boot:group: ranks do not agree at 'boot:group': rank" in (heard(texts) or "agreed")


def run_check(monkeypatch, envs):
    """engine_check on as many threads as ranks, meeting in a gather; the environment is each rank's own."""
    from dsv41_dist.cli import engine_checks

    facts = []
    for env in envs:
        with monkeypatch.context() as patch:
            for name, text in env.items():
                patch.setenv(name, text)
            facts.append(engine_checks.engine_facts())
    results = [None] * len(envs)

    def work(rank):
        agreement = SimpleNamespace(gather=lambda value, label: facts)
        results[rank] = engine_checks.engine_check(SimpleNamespace(comm=SimpleNamespace(agreement=agreement)))

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(envs))]
    [thread.start() for thread in threads]
    [thread.join(30) for thread in threads]
    return results


def test_preflights_engine_section_passes_and_names_the_rank_that_differs(monkeypatch):
    good = run_check(monkeypatch, [{}] * 4)
    assert all(result.reasons == [] and len(result.rows) == 4 for result in good)
    bad = run_check(monkeypatch, [{}, {"DSV41_COMM_CHECK": "1"}, {}, {"DSV41_HC_FUSED": "x"}])
    assert len({tuple(result.reasons) for result in bad}) == 1
    assert any(line.startswith("DSV41_COMM_CHECK: ranks 0,2,3 said unset; rank 1") for line in bad[0].reasons)
    assert any(line.startswith("rank 3: problem: DSV41_HC_FUSED='x'") for line in bad[0].reasons)
