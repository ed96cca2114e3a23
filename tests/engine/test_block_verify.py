"""block_verify on the real accept functions of three releases; block_verify_probe.py runs in the engine's Python."""

from __future__ import annotations

import json

import pytest

from tests.engine.real import HERE, RELEASES, engine_env, run_engine


def probe(python, folder, release, gate):
    env = engine_env(folder, DSV41_BLOCK_VERIFY=gate)
    return run_engine(python, [str(HERE / "block_verify_probe.py"), release], env, timeout=300)


@pytest.fixture(scope="module", params=RELEASES)
def ours(request, engine_python, published):
    result = probe(engine_python, published(request.param), request.param, "1")
    assert result.returncode == 0, result.stderr[-3000:]
    return request.param, json.loads(result.stdout.splitlines()[-1])


@pytest.mark.timeout(400)
def test_sampled_rows_are_the_twin_s_and_stock_paths_stay_stock(ours):
    release, seen = ours
    for path in ("greedy", "simulated", "ragged", "mixed, sampled rows", "mixed, greedy rows"):
        assert seen[path] is True, path
    for path in ("sampled", "top-k and top-p", "in support", "capped"):
        assert seen[path] == [True] * 5, path
    assert seen["fired on stock paths"] == 0
    assert seen["dtypes"] == [["torch.int32", "torch.int64", "torch.int32"] * 2]
    assert seen.get("one-hot draft", release == "0.5.21") is True
    assert seen.get("region uses it", release != "0.5.23") is True


@pytest.mark.timeout(400)
def test_the_native_kernel_decides_the_same_from_the_same_coins(ours):
    release, seen = ours
    if release == "0.5.21":
        assert "same coins" not in seen
        return
    assert seen["same coins"]["compared"] == (1008 if release == "0.5.23" else 144)
    assert seen["same coins"]["wrong"] == 0
    assert seen["same coins"]["near a threshold"] <= seen["same coins"]["compared"] // 100


@pytest.mark.timeout(400)
def test_the_report_says_fired_and_what_it_keeps(ours):
    _, seen = ours
    (entry,) = seen["report"]["adapters"]
    assert (entry["adapter"], entry["state"], entry["guarantee"]) == ("block_verify", "fired", "exact in distribution")
    assert entry["memory_bytes"] == 24  # key and counter, and the word of the barrier


@pytest.mark.timeout(400)
@pytest.mark.parametrize("release", RELEASES)
def test_native_is_the_engine_s_own_flag_or_a_refusal(engine_python, published, release):
    result = probe(engine_python, published(release), release, "native")
    if release == "0.5.21":
        assert result.returncode == 1
        assert "0.5.21 has no block verification of its own; DSV41_BLOCK_VERIFY=1 brings it" in result.stderr
        return
    assert result.returncode == 0, result.stderr[-3000:]
    seen = json.loads(result.stdout.splitlines()[-1])
    assert seen["native"] == [True] * 12
    assert seen["differs from the token rule"] > 0
    assert seen["report"]["adapters"][0]["memory_bytes"] == 0
