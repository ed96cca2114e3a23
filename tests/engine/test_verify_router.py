"""The router part of `bench verify` on the router source of three releases, in the engine's Python."""

from __future__ import annotations

import json

import pytest

from tests.engine.real import HERE, RELEASES, engine_env, run_engine


@pytest.mark.timeout(330)
@pytest.mark.parametrize("release", RELEASES)
def test_the_live_router_is_compared_with_the_copy_and_timed(release, engine_python, published):
    env = engine_env(published(release), door=False)
    result = run_engine(engine_python, [str(HERE / "verify_router_probe.py")], env, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    seen = json.loads(result.stdout.splitlines()[-1])
    assert seen["facts"]["release"] == release
    assert [(row["rows"], row["experts"], row["top_k"], row["wrong"]) for row in seen["rows"]] == [
        (6, 384, 6, 0),
    ]
    assert all(row["moved"] > 0 and row["live_half_p50_us"] > 0 for row in seen["rows"])
    assert seen["deaf"][0]["wrong"] > 0
