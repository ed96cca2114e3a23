"""The consistency table reads the engine's real configuration in three releases; facts_probe.py runs there."""

from __future__ import annotations

import json

import pytest

from tests.engine.real import HERE, RELEASES, engine_env

ENVIRONMENT = {
    "SGLANG_SIMULATE_ACC_LEN": "3",
    "SGLANG_DSPARK_USE_GREEDY_DRAFT": "1",
    "SGLANG_DSPARK_FUSED_ACCEPT_TAIL": "1",
    "SGLANG_OPT_DEEPGEMM_MEGA_GATE": "1",
}
# What each release can turn on.
HAS = {
    "0.5.21": {"simulated", "torch_compile"},
    "0.5.22": {"simulated", "torch_compile", "greedy_draft", "block_flag"},
    "0.5.23": {
        "simulated", "torch_compile", "greedy_draft", "block_flag", "fused_tail", "mega_gate", "megakernel",
    },
}  # fmt: skip


@pytest.mark.parametrize("release", RELEASES)
def test_every_fact_is_read_where_the_release_has_it(warm_engine, published, release):
    started, facts = {}, {}
    for state in ("off", "on"):
        env = engine_env(published(release), door=False, **(ENVIRONMENT if state == "on" else {}))
        started[state] = warm_engine.start([HERE / "facts_probe.py", release, state], env)
    for state, process in started.items():
        result = process.complete()
        assert result.returncode == 0, result.stderr[-3000:]
        facts[state] = json.loads(result.stdout.splitlines()[-1])
    switches = {name for name, value in facts["off"].items() if value is False}
    assert {name for name in switches if facts["on"][name]} == HAS[release] | {"blockwise", "region"}
    assert facts["off"]["escaped_layers"] == []
    # A vision gate routes by moe_fused_gate whatever the format; the others leave it to the experts' kernel.
    assert facts["on"]["escaped_layers"] == [3, 5]
    assert (facts["on"]["mode"], facts["on"]["stride"], facts["on"]["plan_synced"]) == ("static", 6, True)
