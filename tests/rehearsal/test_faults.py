"""A killed rank and an interrupted command: named, and nothing left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from dsv41_dist.rehearsal.run import boot_engine
from dsv41_dist.rehearsal.settings import PACKAGE_ROOT, Stage, default_stages

from .fixture import Sessions


def test_a_killed_scheduler_ends_the_boot_in_time_and_is_named(rehearsals, tmp_path):
    endless = (Stage("long", default_stages(long=False)[0].prompts, 60),)
    killed: dict[str, float] = {}
    record = tmp_path / "rank2.jsonl"

    def kill(pid: int) -> None:
        while not record.is_file() or '"DECODE"' not in record.read_text():
            time.sleep(0.1)
            if not Path(f"/proc/{pid}").exists():
                return
        killed["at"] = time.monotonic()
        os.kill(pid, signal.SIGKILL)

    def on_ready(line: str) -> None:
        found = re.search(r"rank 2: (\d+)", line)
        if found:
            threading.Thread(target=kill, args=(int(found[1]),)).start()

    with Sessions() as sessions:
        boot = rehearsals.boot(stages=endless, extra_env={"REHEARSED_BY": sessions.mark})
        outcome = boot_engine(rehearsals.python, boot, "stock", say=on_ready, folder=tmp_path)
        assert "at" in killed, outcome.problem
        took = time.monotonic() - killed["at"]
        print(f"ended {took:.1f} s after the kill")
        assert sessions.alive() == []
    assert re.match(r"lost rank 2 \(process \d+\)", outcome.problem), outcome.problem
    assert outcome.stages == []


def test_an_interrupted_command_leaves_no_process(rehearsals):
    with Sessions() as sessions:
        env = {
            **os.environ,
            "REHEARSED_BY": sessions.mark,
            "DSV41_ENGINE_PYTHON": rehearsals.python,
            "PYTHONPATH": str(PACKAGE_ROOT),
        }
        command = [sys.executable, "-m", "dsv41_dist", "rehearse", "--tp", "2", "--no-draft"]
        process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        ranks: list[int] = []
        for line in process.stderr:
            if ": ready after" in line:
                ranks = [int(pid) for pid in re.findall(r"rank \d: (\d+)", line)]
                break
        assert len(ranks) == 2
        assert set(ranks) <= set(sessions.alive())
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
        assert process.returncode == 130
        assert "interrupted" in err
        assert sessions.alive() == []
