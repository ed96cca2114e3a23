"""The runner's watch over an engine's processes, with a small program in the engine's place."""

from __future__ import annotations

import os
import stat
import sys
import time
from pathlib import Path

import pytest

from dsv41_dist.rehearsal.run import boot_engine
from dsv41_dist.rehearsal.settings import TAG, Boot, default_stages, engine_environment

HEAD = """
import json, os, subprocess, sys, time
folder = sys.argv[-1]

def say(event, **more):
    with open(os.path.join(folder, "events.jsonl"), "a") as file:
        file.write(json.dumps({"event": event, "seconds": 0.0, **more}) + "\\n")

def ranks(count):
    held = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) for _ in range(count)]
    say("ready", ranks={str(i): p.pid for i, p in enumerate(held)}, version="0.0")
    return held
"""


@pytest.fixture
def boot_as(tmp_path):
    """Run boot_engine with a program in the place of the engine's interpreter."""

    def run(program: str, timeout_s: float = 30.0, say=lambda line: None, **what):
        body = tmp_path / "body.py"
        body.write_text(HEAD + program)
        python = tmp_path / "python"
        python.write_text(f'#!/bin/sh\nexec {sys.executable} {body} "$@"\n')
        python.chmod(python.stat().st_mode | stat.S_IXUSR)
        boot = Boot(checkpoint="none", stages=default_stages(long=False), **what)
        folder = tmp_path / "boot"
        return boot_engine(str(python), boot, "stock", timeout_s=timeout_s, folder=folder, say=say)

    return run


def tagged() -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environ = (entry / "environ").read_bytes()
            except OSError:
                continue
            if f"{TAG}=".encode() in environ and b"checkpoint-none" in environ:
                found.append(int(entry.name))
    return found


MARK = {"extra_env": {"REHEARSAL_TEST": "checkpoint-none"}}


def test_a_run_to_the_end(boot_as):
    outcome = boot_as("held = ranks(4)\nsay('stage', name='s', tokens=[[1]], cached=[0])\nsay('done')\n", **MARK)
    assert outcome.problem == ""
    assert [stage["tokens"] for stage in outcome.stages] == [[[1]]]
    assert tagged() == []  # its ranks were still there


def test_a_lost_rank_is_named_and_the_others_are_ended(boot_as):
    outcome = boot_as("held = ranks(4)\ntime.sleep(0.5)\nheld[2].kill()\ntime.sleep(600)\n", **MARK)
    assert outcome.problem.startswith("lost rank 2 (process ")
    assert tagged() == []


def test_a_rank_that_ends_by_an_error_is_named_with_it(boot_as):
    outcome = boot_as(
        "held = ranks(4)\ntime.sleep(0.5)\n"
        "print('[TP2] Scheduler hit an exception: Traceback (most recent call last):')\n"
        "print('NotImplementedError: no stand-in for JIT kernel x')\nsys.stdout.flush()\n"
        "for rank in held:\n    rank.kill()\ntime.sleep(0.05)\nos.kill(os.getpid(), 9)\n"
    )
    assert outcome.problem.startswith("lost rank 0 (process ")
    assert outcome.problem.endswith("requests were running: NotImplementedError: no stand-in for JIT kernel x")


@pytest.mark.parametrize(
    "error",
    [
        "dsv41_dist.comm.errors.RankTimeout: rank 2 did not come to 'logits' within 30 s",
        "dsv41_dist.comm.errors.TransportUnavailable: transport 'roce' cannot be used here: x",
        "dsv41_dist.comm.errors.DisagreementError: ranks do not agree at 'x'",
    ],
)
def test_an_error_of_this_package_is_the_reason(boot_as, error):
    lines = ["ImportError: libcuda is not there: ignored", *(f"later line {i}" for i in range(9)), error]
    # What the other ranks say once their peer is gone is no reason.
    lines += ["RuntimeError: [pair.cc:525] Connection closed by peer [127.0.0.1]:40"]
    program = f"print(*{lines!r}, sep=chr(10))\nsys.exit(1)\n"
    assert boot_as(program).problem == f"the engine ended with status 1: {error}"


def test_ranks_that_end_after_the_last_answer_are_not_lost(boot_as):
    program = (
        "held = ranks(4)\ntime.sleep(0.5)\nsay('stage', name='first', tokens=[[1]], cached=[0])\ntime.sleep(0.5)\n"
        "say('done')\nfor rank in held:\n    rank.kill()\n    rank.wait()\n"
    )
    # A terminal that takes its time: all of it happens between the events and the look at the ranks.
    outcome = boot_as(program, say=lambda line: time.sleep(1.5) if "first" in line else None)
    assert outcome.problem == ""


@pytest.mark.parametrize("count", [0, 3])
def test_scheduler_processes_that_cannot_be_found_cannot_be_watched(boot_as, count):
    outcome = boot_as(f"held = ranks({count})\nsay('done')\n")
    found = ", ".join(map(str, range(count))) or "none"
    assert outcome.problem.startswith(f"TP4, and the scheduler processes of these ranks were found: {found}")


def test_the_time_is_bounded(boot_as):
    outcome = boot_as("print('loading')\nsys.stdout.flush()\ntime.sleep(600)\n", timeout_s=2.0, **MARK)
    assert outcome.problem == "the engine did not finish in time; the last lines of its log: loading"
    assert tagged() == []


def test_a_refusal_is_the_reason_in_full(boot_as):
    paragraph = "dsv41_dist refuses to go on: the ranks do not agree:\\n  rank 3: drift: some target. Do this."
    outcome = boot_as(
        f"print({paragraph!r}.replace('\\\\n', chr(10)))\nprint()\nprint('ValueError: later')\nsys.exit(1)\n"
    )
    assert outcome.problem.startswith("the engine ended with status 1: dsv41_dist refuses to go on: ")
    assert "rank 3: drift: some target. Do this." in outcome.problem


def test_another_failure_is_its_last_error(boot_as):
    outcome = boot_as("raise RuntimeError('no memory')\n")
    assert outcome.problem == "the engine ended with status 1: RuntimeError: no memory"


def test_an_engine_that_ends_before_it_is_done_is_a_problem(boot_as):
    assert boot_as("print('bye')\n").problem == "the engine ended with status 0: bye"


def test_stock_has_no_door_and_no_gate(tmp_path):
    base = {"DSV41_COMM_CHECK": "1", "SGLANG_X": "1", "PYTHONPATH": "/elsewhere", "HOME": "/h", "PATH": "/bin"}
    stock = engine_environment(Boot("c", ()), tmp_path / "a", "run", base)
    adapted = engine_environment(Boot("c", (), gates={"DSV41_X": "1"}), tmp_path / "b", "run", base)
    for env in (stock, adapted):
        assert "SGLANG_X" not in env
        assert "DSV41_COMM_CHECK" not in env
        assert "/elsewhere" not in env["PYTHONPATH"]
        assert env["HOME"] == "/h"
    assert "sitecustomize" not in stock["PYTHONPATH"]
    assert not [name for name in stock if name.startswith("DSV41_")]
    assert adapted["PYTHONPATH"].split(os.pathsep)[0].endswith("dsv41_dist/sitecustomize")
    assert (adapted["DSV41_X"], adapted["DSV41_BOOT_REPORT"]) == ("1", str(tmp_path / "b" / "boot_report.json"))


def test_a_boot_is_the_same_after_json():
    boot = Boot("c", default_stages(), gates={"DSV41_X": "1"}, extra_path=("a",))
    again = Boot.from_json(boot.as_json())
    assert again == boot
    assert again.digest() == boot.digest() != Boot("c", default_stages()).digest()
