"""The row kernels of `bench prefill` in the interpreter of the engine's environment, and compiled for sm90."""

from __future__ import annotations

import pytest

from tests.engine.real import engine_env, run_engine


@pytest.mark.timeout(330)
def test_kernels_are_their_twins_and_compile(engine_python, published, tmp_path):
    env = engine_env(published("0.5.23"), door=False, TRITON_CACHE_DIR=str(tmp_path))
    code = "from tests.unit.bench import prefill_kernels as cases; print(cases.run() == cases.CASES)"
    done = run_engine(engine_python, ["-c", code], env, timeout=150)
    assert done.stdout == "True\n", done.stderr[-3000:]
    del env["TRITON_INTERPRET"]
    done = run_engine(engine_python, ["-m", "tests.unit.bench.prefill_kernels"], env, timeout=150)
    assert done.stdout == "compiled\n", done.stderr[-3000:]
