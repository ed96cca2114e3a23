"""router_live on the router source of three releases; router_live_probe.py runs in the engine's Python."""

from __future__ import annotations

import json
import os
import shutil

import pytest

from tests.engine.real import HERE, RELEASES, engine_env, run_engine

GATE = "sglang/kernels/ops/moe/moe_fused_gate.py"


def probe(python, folder, **gates):
    return run_engine(python, [str(HERE / "router_live_probe.py")], engine_env(folder, **gates), timeout=300)


@pytest.fixture(scope="module", params=RELEASES)
def seen(request, engine_python, published):
    result = probe(engine_python, published(request.param), DSV41_VERIFY_CAP="3", DSV41_ROUTER_LIVE="1")
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


def test_it_is_the_stock_router_and_a_row_copy_bit_for_bit(seen):
    assert len(seen["cases"]) == 16
    for case in seen["cases"]:
        assert case["equal"], case
        assert case["routed"] == 1, case
        assert case["changed"], case  # the case has dead rows whose own experts differ
        assert case["no live rows"], case
        assert case["outside the scope"], case


def test_other_gates_inside_the_scope_are_stock(seen):
    assert seen["others"] == [True, True, True]


def test_every_anchor_that_is_missing_or_there_twice_is_refused(seen):
    assert seen["refused"] == [True] * 16


def test_it_fired_and_verify_cap_s_own_copy_did_not_run_beside_it(seen):
    entries = {entry["adapter"]: entry for entry in seen["report"]["adapters"]}
    assert list(entries) == ["verify_cap", "router_live"]
    assert entries["router_live"]["fired"] == 16
    assert entries["router_live"]["guarantee"] == "bit-identical"


def test_without_verify_cap_it_is_refused(engine_python, published):
    result = probe(engine_python, published(RELEASES[-1]), DSV41_ROUTER_LIVE="1")
    assert result.returncode == 1
    assert "router_live does not go with no verify_cap" in result.stderr


def test_a_changed_engine_source_is_refused_at_import(engine_python, published, tmp_path):
    """A line beside every fingerprinted function: only the anchors see it."""
    tree = tmp_path / "engine"
    shutil.copytree(published(RELEASES[-1]), tree, copy_function=os.link)
    file = tree / GATE
    text = file.read_text()
    file.unlink()
    file.write_text(text + '\n_UNUSED = """\n    USE_PDL: tl.constexpr,\n    stride_bias,\n"""\n')
    result = probe(engine_python, tree, DSV41_VERIFY_CAP="3", DSV41_ROUTER_LIVE="1")
    assert result.returncode == 1
    assert "anchor 2 of 8" in result.stderr
    assert "occurs 2 times" in result.stderr
