"""draft_tau on the real draft functions of three releases; draft_tau_probe.py runs in the engine's Python."""

from __future__ import annotations

import json

import pytest

from tests.engine.real import HERE, RELEASES, engine_env, run_engine

TAU = 0.5
STOCK, SCALED = [0.7, 1.0, 1e-5], [0.35, 0.5, 1e-5]  # the last is clamped from 5e-6


@pytest.fixture(scope="module", params=RELEASES)
def runs(request, engine_python, published):
    """(release, stock result, scaled result)."""
    out = []
    for gate in ("1", str(TAU)):
        env = engine_env(published(request.param), DSV41_DRAFT_TAU=gate)
        result = run_engine(engine_python, [str(HERE / "draft_tau_probe.py"), request.param], env)
        assert result.returncode == 0, result.stderr[-3000:]
        out.append(json.loads(result.stdout.splitlines()[-1]))
    return request.param, *out


def test_the_graph_s_buffers_are_scaled_in_place_and_greedy_rows_stay_greedy(runs):
    release, stock, scaled = runs
    assert stock["staged"]["temperatures"] == pytest.approx(STOCK)
    assert scaled["staged"]["temperatures"] == pytest.approx(SCALED)
    assert scaled["staged"]["greedy_mask"] == stock["staged"]["greedy_mask"] == [False, True, False]
    if release != "0.5.21":
        assert scaled["staged"]["step_temperatures"] == pytest.approx([0.35, 0.0, 1e-5])
    assert scaled["staged"]["none"] == stock["staged"]["none"] == [1.0, 1.0, 1.0]


def test_an_eager_draft_samples_and_is_tested_at_the_same_scaled_temperature(runs):
    release, stock, scaled = runs
    assert stock["eager"]["tested at"] == pytest.approx(STOCK)
    assert scaled["eager"]["tested at"] == pytest.approx(SCALED)
    for result in (stock, scaled):
        sampled, tested = result["eager"]["sampled at"], result["eager"]["tested at"]
        # From 0.5.22 on a greedy row is drafted at temperature 0.
        assert [sampled[0], sampled[2]] == [tested[0], tested[2]]
        assert sampled[1] == (tested[1] if release == "0.5.21" else 0.0)


def test_the_region_s_target_keeps_its_own_temperature(runs):
    release, stock, scaled = runs
    if release != "0.5.23":
        assert "region" not in stock
        return
    for step, wanted in enumerate(([0.7, 1.0, 1e-5], [2.0, 1.0, 3.0])):
        assert stock["region"]["steps"][step]["target"] == pytest.approx(wanted)
        assert stock["region"]["steps"][step]["draft"] == pytest.approx(wanted)
        assert scaled["region"]["steps"][step]["target"] == pytest.approx(wanted)
        assert scaled["region"]["steps"][step]["draft"] == pytest.approx([max(t * TAU, 1e-5) for t in wanted])


def test_the_report_says_fired_and_1_is_off(runs):
    release, stock, scaled = runs
    assert stock["report"]["adapters"] == []
    (entry,) = scaled["report"]["adapters"]
    assert (entry["adapter"], entry["state"], entry["guarantee"]) == ("draft_tau", "fired", "exact in distribution")
    assert entry["memory_bytes"] == (16 if release == "0.5.23" else 0)
