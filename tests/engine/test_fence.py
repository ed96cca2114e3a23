"""folded_result_fence on the real accept classes of three releases; fence_probe.py runs in the engine's Python."""

from __future__ import annotations

import json

import pytest

from tests.engine.real import HERE, RELEASES, engine_env

FIELDS = ["bonus", "cap_trim_lens", "commit_lens", "correct_len", "new_seq_lens", "out_tokens"]
VIEWS = {
    "0.5.21": {"folded": FIELDS},
    "0.5.22": {"folded": FIELDS},
    "0.5.23": {"folded": FIELDS, "block lens, folded": ["block"], "region": FIELDS},
}
OWN = {
    "0.5.21": ["eager"],
    "0.5.22": ["eager"],
    "0.5.23": ["eager", "block lens, eager"],
}


@pytest.fixture(scope="module", params=RELEASES)
def runs(request, warm_engine, published):
    """(release, stock result, fenced result)."""
    started = []
    for gate in ("0", "1"):
        env = engine_env(
            published(request.param), DSV41_FOLDED_FENCE=gate, SGLANG_OPT_DSV41_POST_FORWARD_CUDA_GRAPH="1"
        )
        started.append(warm_engine.start([HERE / "fence_probe.py"], env))
    out = []
    for process in started:
        result = process.complete()
        assert result.returncode == 0, result.stderr[-3000:]
        out.append(json.loads(result.stdout.splitlines()[-1]))
    return request.param, *out


def test_the_stock_engine_hands_out_views_that_the_next_step_rewrites(runs):
    release, stock, _ = runs
    assert {path: seen["shared"] for path, seen in stock["paths"].items() if seen["shared"]} == VIEWS[release]
    assert {path: seen["changed"] for path, seen in stock["paths"].items() if seen["changed"]} == VIEWS[release]


def test_with_the_fence_no_path_shares_memory_and_no_result_changes(runs):
    release, _, fenced = runs
    assert sorted(fenced["paths"]) == sorted([*VIEWS[release], *OWN[release]])
    for path, seen in fenced["paths"].items():
        assert (path, seen["shared"], seen["changed"]) == (path, [], [])


def test_values_and_dtypes_are_those_of_the_stock_engine(runs):
    _, stock, fenced = runs
    for path, seen in stock["paths"].items():
        assert fenced["paths"][path]["values"] == seen["values"]
        assert fenced["paths"][path]["dtypes"] == seen["dtypes"]


def test_the_report_says_fired_and_what_it_costs(runs):
    release, stock, fenced = runs
    assert stock["report"]["adapters"] == []
    (entry,) = fenced["report"]["adapters"]
    assert (entry["adapter"], entry["state"], entry["guarantee"]) == ("folded_result_fence", "fired", "bit-identical")
    # Three requests, stride 6: (3 + 3 + 3 + 18) int64 and (3 + 3) int32, two steps alive; then the block lengths.
    assert entry["memory_bytes"] == 2 * (27 * 8 + 6 * 4) + (2 * 3 * 4 if release == "0.5.23" else 0)
    # Once for each call whose result was a view; the eager paths do not fire.
    assert entry["fired"] == {"0.5.21": 1, "0.5.22": 1, "0.5.23": 5}[release]
    assert len(entry["patched"]) == {"0.5.21": 1, "0.5.22": 1, "0.5.23": 3}[release]
