"""The published engine in the default run of the tests: one stock boot, and one with all that promises the same bytes.

Two boots for every question that can share them. In the very last forward of the adapted one a test plugin flips a bit:
all before it must be as it was, and the comparison must find it. test_boots.py asks the rest.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dsv41_dist.adapters import REGISTRY, Guarantee
from dsv41_dist.rehearsal.gate_sets import cannot_fire, every_gate
from dsv41_dist.rehearsal.report import judge, text
from dsv41_dist.rehearsal.settings import Stage, default_stages
from dsv41_dist.rehearsal.verdict import Outcome, compare

TP = 4
FLIP = str(Path(__file__).with_name("plugins") / "flip")
# Drafts and the rows that they are verified with; two full prefill chunks, since the first of a size is a self-check.
SHORT, LONG = default_stages(long=False)[0].prompts, default_stages()[1].prompts[0][:520]
STAGES = (Stage("four at once", SHORT[4:8], 4), Stage("520 rows in chunks", (LONG,), 2), Stage("two", SHORT[:2], 3))
# router_live acts on capped verify steps, and a cap may change drafts.
NAMES = [a.name for a in REGISTRY if a.guarantee == Guarantee.BIT_IDENTICAL and a.name != "router_live"] + [
    "prefill_sp"
]
GATES = {**every_gate(NAMES), "DSV41_PREFILL_SP_EXACT": "1"}


@pytest.fixture(scope="module")
def stock(rehearsals) -> Outcome:
    outcome = rehearsals.stock(tp=TP, speculative=True, stages=STAGES)
    assert outcome.problem == "", outcome.log
    return outcome


@pytest.fixture(scope="module")
def adapted(rehearsals, stock) -> Outcome:
    rows = [entry["rows"] for entry in stock.ranks[0] if not entry["draft"]]
    last = {"REHEARSAL_FLIP": f"{rows[-1]} {rows.count(rows[-1])}"}
    outcome = rehearsals.adapted(GATES, tp=TP, speculative=True, stages=STAGES, extra_path=(FLIP,), extra_env=last)
    assert outcome.problem == "", outcome.log
    return outcome


def before_the_last_forward(outcome: Outcome) -> Outcome:
    return replace(outcome, ranks={rank: entries[:-1] for rank, entries in outcome.ranks.items()})


def test_the_adapted_engine_has_every_byte_of_the_stock_one(stock, adapted):
    assert sorted(stock.ranks) == sorted(adapted.ranks) == list(range(TP))
    assert [len(tokens) for stage in adapted.stages for tokens in stage["tokens"]] == [4] * 4 + [2] + [3] * 2
    boots = [before_the_last_forward(stock), before_the_last_forward(adapted)]
    found = compare(*boots)
    assert (found.problems, found.tokens_equal, found.logits_equal) == ([], True, True)
    modes = {(entry["mode"], entry["draft"]) for entry in boots[1].ranks[0]}
    assert modes == {("EXTEND", False), ("TARGET_VERIFY", True), ("TARGET_VERIFY", False)}
    # The draft's too, which have hidden states and no logits.
    assert found.forwards == len(boots[1].ranks[0])
    problems, _ = judge(boots, found, NAMES, True)
    assert problems == []
    assert text(boots, found, problems, [], "", 0.0).splitlines()[-1].startswith("READY")


def test_one_flipped_bit_of_one_forward_is_not_ready(stock, adapted):
    found = compare(stock, adapted)
    last = stock.ranks[0][-1]
    where = f"forward {len(stock.ranks[0]) - 1} ({last['mode']}, {last['rows']} rows), row 0"
    assert found.problems == [f"logits bytes differ first at {where}"]
    problems, _ = judge([stock, adapted], found, NAMES, True)
    assert text([stock, adapted], found, problems, [], "", 0.0).splitlines()[-1].startswith("NOT READY")


def test_every_adapter_is_installed_and_fires_on_every_rank(adapted):
    assert adapted.boot_report["ranks"] == TP
    states = {entry["adapter"]: entry["state"] for entry in adapted.boot_report["adapters"]}
    assert sorted(states) == sorted(NAMES)
    fires = [name for name in NAMES if not cannot_fire(name) and states[name] != "native"]
    assert {"replicated_split", "roce_gather", "prefill_sp", "spark_prefill_dense"} <= set(fires)
    assert {name: all(adapted.fired[name]) for name in fires} == dict.fromkeys(fires, True), adapted.fired
    assert {len(counts) for counts in adapted.fired.values()} == {TP}
