"""The speculative kernels in the interpreter that comes with the engine's environment, and compiled for sm90."""

from __future__ import annotations

import json

import pytest

from tests.engine.real import HERE, engine_env, run_engine


@pytest.mark.timeout(660)
def test_kernels_are_their_twins(engine_python, published):
    env = engine_env(published("0.5.23"), door=False)
    result = run_engine(engine_python, [str(HERE / "speculative_kernels_probe.py")], env, timeout=600)
    assert result.returncode == 0, result.stderr[-3000:]
    assert json.loads(result.stdout.splitlines()[-1]) == {"block": 264, "live": 120, "copy": 96}


@pytest.mark.timeout(330)
def test_kernels_compile_for_sm90(engine_python, published, tmp_path):
    env = engine_env(published("0.5.23"), door=False, TRITON_CACHE_DIR=str(tmp_path))
    del env["TRITON_INTERPRET"]
    result = run_engine(engine_python, ["-m", "tests.unit.speculative.compile_kernels"], env, timeout=300)
    assert result.stdout == "compiled\n", result.stderr[-3000:]
