"""A warm start (tests/warm.py) is told from a real one by nothing but its time."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from tests.warm import Warm

ENV = {"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8"}


@pytest.fixture(scope="module")
def warm():
    with Warm(sys.executable, ["wave", "no_such_package"], ENV) as started:
        yield started


SEEN = """
import json, os, sys, __main__
print(json.dumps([sys.argv[1:], sys.path, dict(os.environ), os.getcwd(), __name__, vars(__main__) is globals()]))
print("said", file=sys.stderr)
"""


@pytest.mark.parametrize("how", ["script", "-c", "-m"])
def test_a_program_sees_what_it_would_after_a_real_start(warm, tmp_path, how):
    (tmp_path / "seen.py").write_text(SEEN)
    (tmp_path / "elsewhere").mkdir()
    env = {**ENV, "ONLY": "here", "PYTHONPATH": str(tmp_path / "elsewhere")}
    args = {"script": [str(tmp_path / "seen.py")], "-c": ["-c", SEEN], "-m": ["-m", "seen"]}[how] + ["1", "two"]
    ours = warm.run(args, env, cwd=tmp_path)
    real = subprocess.run([sys.executable, *args], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (ours.returncode, ours.stdout, ours.stderr) == (0, real.stdout, "said\n")
    assert '"ONLY": "here"' in ours.stdout


def test_what_it_imported_early_is_there_and_sitecustomize_comes_first(warm, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.early = 'wave' in sys.modules\n")
    done = warm.run(
        ["-c", "import sys; print(sys.early, 'tests' in sys.modules)"], {**ENV, "PYTHONPATH": str(tmp_path)}
    )
    assert done.stdout == "True False\n"
    (tmp_path / "sitecustomize.py").write_text("raise SystemExit(3)\n")
    done = warm.run(["-c", "print('never')"], {**ENV, "PYTHONPATH": str(tmp_path)})
    assert (done.returncode, done.stdout) == (3, "")


@pytest.mark.parametrize(
    ("code", "status", "out", "err"),
    [
        ("import atexit; atexit.register(print, 'over'); raise SystemExit(7)", 7, "over\n", ""),
        ("raise SystemExit('why')", 1, "", "why\n"),
        ("raise ValueError('broken')", 1, "", "ValueError: broken\n"),
        ("import os; os._exit(9)", 9, "", ""),
        ("import os; os.kill(os.getpid(), 9)", -9, "", ""),
        ("import threading, time; threading.Timer(0.2, print, ['late']).start()", 0, "late\n", ""),
    ],
)
def test_it_ends_as_python_ends(warm, code, status, out, err):
    done = warm.run(["-c", code], ENV)
    assert (done.returncode, done.stdout) == (status, out)
    assert done.stderr.endswith(err)
    assert bool(done.stderr) == bool(err)


def test_two_at_once_a_kill_and_a_timeout(warm):
    first, second = (warm.start(["-c", "import time; time.sleep(60)"], ENV) for _ in range(2))
    assert (first.poll(), second.poll()) == (None, None)
    first.kill()
    assert first.wait(10) == -9
    with pytest.raises(subprocess.TimeoutExpired):
        second.complete(0.1)
    assert second.wait(10) == -9


def test_nothing_outlives_it():
    with Warm(sys.executable, [], ENV) as started:
        pid = started.start(["-c", "import time; time.sleep(60)"], ENV).pid
        os.kill(pid, 0)
    deadline = time.monotonic() + 10
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{pid}")
