"""The scripts as the documents call them: arguments, interpreters, and the status of what they run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def call(*command, cwd=ROOT, **env):
    clean = {k: v for k, v in os.environ.items() if not k.startswith("DSV41_") and k != "PYTHONPATH"}
    return subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=100, cwd=cwd, env={**clean, **env}
    )


@pytest.fixture
def stubs(tmp_path):
    """Commands of these names and bodies, first on PATH."""

    def make(**bodies):
        for name, body in bodies.items():
            file = tmp_path / name.replace("_", "-")
            file.write_text(f"#!/bin/sh\n{body}\n")
            file.chmod(0o755)
        return f"{tmp_path}:{os.environ['PATH']}"

    return make


@pytest.mark.parametrize("bad", ["memcheck", "racecheck", "none"])
def test_the_errors_of_any_sanitizer_tool_fail_the_part(bad, stubs, tmp_path):
    path = stubs(compute_sanitizer=f'echo "ERROR SUMMARY of $2"; [ "$2" != {bad} ] || exit 9')
    done = call("benchmarks/peer_gpu.sh", tmp_path, "2", "sanitize", PATH=path)
    assert "ERROR SUMMARY of memcheck" in done.stdout
    assert "ERROR SUMMARY of racecheck" in done.stdout
    assert done.returncode == (0 if bad == "none" else 1), done.stdout
    assert ("FAILED: sanitize(9)" in done.stdout) == (bad != "none")


def test_the_peer_parts_need_only_a_folder(stubs, tmp_path):
    done = call("benchmarks/peer_gpu.sh", tmp_path, PATH=stubs(python3="echo 2", compute_sanitizer="exit 0"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all parts passed: links bits graphs " in done.stdout


def test_an_interpreter_may_be_named_from_where_the_caller_is(tmp_path):
    (tmp_path / "python").symlink_to(sys.executable)
    show = f'source {ROOT}/launch/_python.sh; cd /; "$PY" -c "print(1)"; echo "$DSV41_PYTHON"'
    done = call("bash", "-euc", show, cwd=tmp_path, DSV41_PYTHON="./python")
    assert done.stdout.split() == ["1", f"{tmp_path}/./python"], done.stderr


@pytest.mark.parametrize("arguments", [["--wheel"], [""], ["--wheels", "more"]])
def test_the_engine_s_environment_is_not_made_for_a_mistyped_argument(arguments, tmp_path):
    done = call("launch/engine_env.sh", *arguments, DSV41_PYTHON="false", XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 2
    assert f"'{' '.join(arguments)}': allowed is no argument, or --wheels" in done.stderr
    assert list(tmp_path.iterdir()) == []
