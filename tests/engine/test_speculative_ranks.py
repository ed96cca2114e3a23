"""Four gloo ranks in the order in which the engine starts: the speculative adapters and the fence together, and one
rank that drafts at another temperature."""

from __future__ import annotations

import json

import pytest

from tests.engine.test_four_ranks import BOUND_S, WORLD, refused_alike, start

pytestmark = pytest.mark.timeout(BOUND_S + 60)

ALL = {
    "DSV41_DRAFT_TAU": "0.8",
    "DSV41_BLOCK_VERIFY": "1",
    "DSV41_FOLDED_FENCE": "1",
    "DSV41_VERIFY_CAP": "conf:0.1",
    "DSV41_ROUTER_LIVE": "1",
}


def test_all_together_install_and_agree(engine_python, published):
    ended = start(engine_python, [published("0.5.23")] * WORLD, [ALL] * WORLD)
    assert [one.status for one in ended] == [0] * WORLD, ended[0].err[-3000:]
    seen = [json.loads(one.out.splitlines()[-1]) for one in ended]
    assert [one["ready"] for one in seen] == [True] * WORLD
    assert len({json.dumps(one["report"]["adapters"]) for one in seen}) == 1
    patched = {entry["adapter"]: entry["patched"] for entry in seen[0]["report"]["adapters"]}
    assert list(patched) == ["draft_tau", "block_verify", "folded_result_fence", "verify_cap", "router_live"]
    accept = "sglang.srt.speculative.dspark_components.dspark_verify:accept_draft_tokens"
    assert accept in patched["block_verify"]
    assert accept in patched["verify_cap"]


def test_one_rank_with_another_tau_ends_all_four_by_name(engine_python, published):
    envs = [ALL, ALL, {**ALL, "DSV41_DRAFT_TAU": "0.9"}, ALL]
    ended = start(engine_python, [published("0.5.23")] * WORLD, envs)
    refused_alike(ended, "DSV41_DRAFT_TAU: ranks 0,1,3 said 0.8; rank 2 said 0.9")
