"""verify_cap around the real draft head, gates and accept functions of three releases; verify_cap_probe.py runs in the
engine's Python."""

from __future__ import annotations

import json

import pytest

from tests.engine.real import HERE, RELEASES, engine_env, run_engine

STRIDE, BS = 6, 3


def probe(python, folder, release, log, cap, *args, **gates):
    env = engine_env(folder, DSV41_VERIFY_CAP=cap, DSV41_VERIFY_CAP_LOG=str(log), **gates)
    return run_engine(python, [str(HERE / "verify_cap_probe.py"), release, *args], env, timeout=300)


@pytest.fixture(scope="module", params=RELEASES)
def confident(request, engine_python, published, tmp_path_factory):
    log = tmp_path_factory.mktemp("cap") / "log.jsonl"
    result = probe(engine_python, published(request.param), request.param, log, "conf:0.4")
    assert result.returncode == 0, result.stderr[-3000:]
    return request.param, json.loads(result.stdout.splitlines()[-1])


def check_common(release, seen):
    assert seen["gates"] == [True] * 3  # fused gates and a hash-routed layer, three patterns of live rows
    assert seen["other shape is stock"]
    assert "2 of 3 MoE layers routed by live rows" in seen["escape"]
    assert seen["greedy"] == [True] * 6
    assert seen["sampled"] == [True] * 6
    assert seen["one address"]
    if release == "0.5.23":
        assert (seen["tail before"], seen["tail after"]) == ([True, True], [False, False])
        assert seen["region"] == [True, True]


def test_gates_accepts_and_buffers(confident):
    release, seen = confident
    check_common(release, seen)
    assert seen["initial"] == [STRIDE] * 4
    assert seen["larger than any graph"] == [STRIDE] * 9


def test_the_head_is_built_in_static_mode_and_live_lengths_follow_from_earlier_drafts_only(confident):
    _, seen = confident
    assert seen["head"] == ["DSparkConfidenceHead", "NoneType"]
    assert seen["causal"] == {"broken": 0, "lengths": [1, 2, 3, 4, 5]}
    assert seen["nan"] == [2] * BS  # one draft is always verified; NaN stops there


def test_the_log_has_one_line_a_step(confident):
    _, seen = confident
    assert seen["log"] == [{"confidence": [[0.25] * 5] * BS, "verified": [1, 2, 5], "accepted": [1, 0, 5]}]


def test_the_report(confident):
    _, seen = confident
    (entry,) = seen["report"]["adapters"]
    assert (entry["adapter"], entry["state"], entry["guarantee"]) == ("verify_cap", "fired", "exact in distribution")
    assert entry["memory_bytes"] == 4 * 4
    assert len(entry["patched"]) == 9


def test_a_fixed_cap_needs_no_head(engine_python, published, tmp_path):
    release = RELEASES[-1]
    result = probe(engine_python, published(release), release, tmp_path / "log", "3")
    assert result.returncode == 0, result.stderr[-3000:]
    seen = json.loads(result.stdout.splitlines()[-1])
    check_common(release, seen)
    assert seen["head"] == ["NoneType", "NoneType"]
    assert seen["initial"] == [4] * 4


def test_all_four_together(engine_python, published, tmp_path):
    """The order of the wrappers: the cap's cutoff reaches block verification, and the router is the live one."""
    release = RELEASES[-1]
    others = {"DSV41_DRAFT_TAU": "0.8", "DSV41_BLOCK_VERIFY": "native", "DSV41_ROUTER_LIVE": "1"}
    result = probe(engine_python, published(release), release, tmp_path / "log", "conf:0.4", **others)
    assert result.returncode == 0, result.stderr[-3000:]
    seen = json.loads(result.stdout.splitlines()[-1])
    assert seen["gates"] == [True] * 3
    assert seen["greedy"] == [True] * 6
    assert seen["region"] == [True, True]
    states = {entry["adapter"]: entry["state"] for entry in seen["report"]["adapters"]}
    assert states == {"draft_tau": "fired", "block_verify": "fired", "verify_cap": "fired", "router_live": "fired"}


@pytest.mark.parametrize("mode", ["compact", "cap-accept"])
def test_a_ragged_mode_is_refused_when_the_worker_is_built(engine_python, published, tmp_path, mode):
    release = RELEASES[-1]
    result = probe(engine_python, published(release), release, tmp_path / "log", "3", mode)
    assert result.returncode == 1
    assert "verify_cap does not go with SGLANG_RAGGED_VERIFY_MODE=compact or cap-accept" in result.stderr


def test_a_log_that_cannot_be_written_is_refused_when_the_worker_is_built(engine_python, published, tmp_path):
    release = RELEASES[-1]
    result = probe(engine_python, published(release), release, tmp_path, "3")
    assert result.returncode == 1
    assert f"DSV41_VERIFY_CAP_LOG={tmp_path} cannot be written on rank 0: " in result.stderr
