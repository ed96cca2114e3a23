"""The consistency table: every row fires for its own fact and for no other, and the page shows the same table."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsv41_dist.adapters import _speculative_modes as modes
from dsv41_dist.engine.gates import Gates
from dsv41_dist.engine.refusal import Refusal
from dsv41_dist.engine.state import AdapterState

ROOT = Path(__file__).parents[3]
ON = {"DSV41_DRAFT_TAU": "0.8", "DSV41_BLOCK_VERIFY": "1", "DSV41_VERIFY_CAP": "conf:0.1", "DSV41_ROUTER_LIVE": "1"}


def facts(release="0.5.23", gates=None, **changes) -> modes.Facts:
    return modes.Facts(Gates.from_env(gates or {}), release, **changes)


@pytest.fixture
def no_latch(monkeypatch):
    """A refusal is final for its process; this one goes on."""
    from dsv41_dist.engine import refusal

    monkeypatch.setattr(refusal, "_first", [])


CASES = [
    # adapter, what is there, the verdicts that follow
    ("draft_tau", {"region": True}, ["forced"]),
    ("draft_tau", {"blockwise": True}, ["allowed"]),
    ("draft_tau", {"gates": {"DSV41_BLOCK_VERIFY": "1"}}, ["allowed"]),
    ("draft_tau", {"greedy_draft": True}, ["refused"]),
    ("draft_tau", {"mode": "compact", "attn_dp": True, "simulated": True, "megakernel": True}, []),
    ("block_verify", {"gates": {"DSV41_BLOCK_VERIFY": "native"}, "release": "0.5.21"}, ["refused"]),
    ("block_verify", {"gates": {"DSV41_BLOCK_VERIFY": "native"}, "release": "0.5.22"}, []),
    ("block_verify", {"block_flag": True}, ["allowed"]),
    ("block_verify", {"blockwise": True}, ["forced"]),
    ("block_verify", {"mode": "compact"}, ["allowed"]),
    ("block_verify", {"simulated": True}, ["allowed"]),
    ("block_verify", {"gates": {"DSV41_VERIFY_CAP": "3"}}, ["forced"]),
    ("block_verify", {"greedy_draft": True, "attn_dp": True, "region": True, "megakernel": True}, []),
    ("verify_cap", {"fused_tail": True}, ["forced"]),
    ("verify_cap", {"mode": "compact"}, ["refused"]),
    ("verify_cap", {"mode": "cap-accept"}, ["refused"]),
    ("verify_cap", {"attn_dp": True}, ["refused"]),
    ("verify_cap", {"simulated": True}, ["refused"]),
    ("verify_cap", {"mega_gate": True}, ["refused"]),
    ("verify_cap", {"mega_moe": True}, ["refused"]),
    ("verify_cap", {"megakernel": True}, ["refused"]),
    ("verify_cap", {"torch_compile": True}, ["refused"]),
    ("verify_cap", {"escaped_layers": (3,)}, ["refused"]),
    ("verify_cap", {"gates": {"DSV41_VERIFY_CAP": "conf:0.1"}, "plan_synced": False}, ["refused"]),
    ("verify_cap", {"gates": {"DSV41_VERIFY_CAP": "3"}, "plan_synced": False}, []),
    ("verify_cap", {"gates": {"DSV41_VERIFY_CAP": "4"}, "stride": 5}, []),
    ("verify_cap", {"gates": {"DSV41_VERIFY_CAP": "conf:0.1"}, "stride": 6}, []),
    ("verify_cap", {"region": True, "blockwise": True, "greedy_draft": True, "block_flag": True}, []),
    ("router_live", {}, ["refused"]),
    ("router_live", {"gates": {"DSV41_VERIFY_CAP": "3"}}, []),
]


@pytest.mark.parametrize(("adapter", "there", "verdicts"), CASES)
def test_each_pair_has_its_verdict(no_latch, adapter, there, verdicts):
    met = [rule for rule in modes.RULES if rule.adapter == adapter and rule.holds(facts(**there))]
    assert [rule.verdict for rule in met] == verdicts
    if "refused" in verdicts:
        with pytest.raises(Refusal) as refusal:
            modes.check(adapter, facts(**there))
        assert met[-1].other in str(refusal.value)
        assert met[-1].why in str(refusal.value)
    else:
        assert modes.check(adapter, facts(**there)) == met


@pytest.mark.parametrize(
    ("value", "stride", "text"),
    [
        ("5", 5, "DSV41_VERIFY_CAP=5: this draft has 4 drafts; allowed is 1..4"),
        ("conf:0.1", 5, "DSV41_VERIFY_CAP=conf:0.1: this draft has 4 drafts; allowed is 1..4"),
        ("conf:0.1,0.2,0.3,0.4", 9, "DSV41_VERIFY_CAP=conf:0.1,0.2,0.3,0.4: this draft has 8 drafts; allowed is 1..5"),
    ],
)
def test_a_cap_that_does_not_fit_the_draft_is_refused_by_its_value(no_latch, value, stride, text):
    with pytest.raises(Refusal) as refusal:
        modes.check("verify_cap", facts(gates={"DSV41_VERIFY_CAP": value}, stride=stride))
    assert text in str(refusal.value)
    assert "one of the two" not in str(refusal.value)


def test_every_rule_has_a_case():
    pairs = [(rule, facts(**there)) for adapter, there, _ in CASES for rule in modes.RULES if rule.adapter == adapter]
    reached = {rule for rule, there in pairs if rule.holds(there)}
    assert reached == set(modes.RULES)


def test_all_four_together_are_allowed_and_the_report_says_what_was_forced():
    notes = {}
    for adapter in ("draft_tau", "block_verify", "verify_cap", "router_live"):
        state = AdapterState(adapter, "")
        modes.note(adapter, state, facts(gates=ON, region=True, blockwise=True, fused_tail=True))
        notes[adapter] = len(state.notes)
    assert notes == {"draft_tau": 1, "block_verify": 2, "verify_cap": 1, "router_live": 0}


def test_the_page_shows_the_table():
    page = (ROOT / "docs" / "speculative.md").read_text()
    for rule in modes.RULES:
        assert f"| {rule.adapter} | {rule.other} | {rule.verdict} | {rule.why} |" in page
