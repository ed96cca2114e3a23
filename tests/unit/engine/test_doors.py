"""The doors: sitecustomize on PYTHONPATH and the plug-in call. Without a gate nothing; with one, all or the end."""

from __future__ import annotations

import shutil

import pytest

from tests.unit.engine.toy import DOOR, ROOT, run_python

HOOKS = "sum(type(f).__name__ == 'Hook' for f in sys.meta_path)"
FENCE = {"DSV41_FOLDED_FENCE": "1"}
SWALLOWED = """
from dsv41_dist.sitecustomize.sitecustomize import arm
try:
    arm()
except Exception:
    pass
print("went on")
"""


def door(code: str, env=None, path: str = str(DOOR), args: tuple[str, ...] = ()):
    return run_python([*args, "-c", code], {"PYTHONPATH": path, **(env or {})})


def test_without_a_gate_nothing_is_imported_and_nothing_armed():
    code = "import sys; print([m for m in sys.modules if m.startswith('dsv41')], " + HOOKS + ")"
    assert door(code).stdout.strip() == "[] 0"
    for value in ("", " ", "0"):
        assert door("import sys; print(" + HOOKS + ")", {"DSV41_FOLDED_FENCE": value}).stdout.strip() == "0"


def test_the_plugin_door_without_a_gate_reads_no_gates():
    code = "import sys; from dsv41_dist.engine import boot; n = set(sys.modules); "
    code += "print(boot.arm(()), set(sys.modules) - n)"
    assert door(code, path=str(ROOT)).stdout.strip() == "False set()"


def test_with_a_gate_the_hook_is_first_and_neither_torch_nor_sglang_is_imported():
    code = "import sys; print(type(sys.meta_path[0]).__name__, " + HOOKS
    code += ", 'torch' in sys.modules, 'sglang' in sys.modules, 'typer' in sys.modules)"
    assert door(code, FENCE).stdout.strip() == "Hook 1 False False False"


def test_children_are_armed_too():
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', \"import sys; print({HOOKS})\"])"
    assert door(code.replace("'Hook'", "chr(72)+'ook'"), FENCE).stdout.strip() == "1"


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"DSV41_FOLDED_FENCE": "maybe"}, ["DSV41_FOLDED_FENCE='maybe'", "allowed is 1/on/true"]),
        ({"DSV41_FOLDED_FENSE": "1"}, ["DSV41_FOLDED_FENSE='1'", "DSV41_FOLDED_FENCE"]),
        ({"SPARK_PREFILL_TP": "0"}, ["SPARK_PREFILL_TP='0'", "SPARK_PREFILL_TP_SPLIT"]),
        ({"DSV41_L2_PREFETCH": "1"}, ["turns on l2_prefetch", "does not have"]),
    ],
)
def test_a_gate_that_cannot_be_honoured_ends_the_interpreter(env, words):
    result = door("print('went on')", env)
    assert result.returncode == 1
    assert "went on" not in result.stdout
    for word in ["dsv41_dist refuses to go on", *words]:
        assert word in result.stderr


def test_a_previous_sitecustomize_still_runs_first_and_keeps_its_name(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys\nMARK = 7\nORDER = len(sys.meta_path)\n")
    code = "import sys, sitecustomize as s; print(s.MARK, s.ORDER == len(sys.meta_path) - 1, " + HOOKS + ")"
    assert door(code, FENCE, f"{DOOR}:{tmp_path}").stdout.strip() == "7 True 1"
    assert door("import sitecustomize as s; print(s.MARK)", {}, f"{DOOR}:{tmp_path}").stdout.strip() == "7"


def test_a_previous_sitecustomize_that_fails_does_not_disarm(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("raise ValueError('theirs')\n")
    result = door("import sys; print(" + HOOKS + ")", FENCE, f"{DOOR}:{tmp_path}")
    assert result.stdout.strip() == "1"
    assert "theirs" in result.stderr


def test_a_previous_sitecustomize_may_set_the_gates(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import os\nos.environ['DSV41_FOLDED_FENCE'] = '1'\n")
    assert door("import sys; print(" + HOOKS + ")", {}, f"{DOOR}:{tmp_path}").stdout.strip() == "1"


def test_two_copies_of_the_door_do_not_call_each_other_in_a_circle(tmp_path):
    copy = tmp_path / "dsv41_dist" / "sitecustomize"
    shutil.copytree(ROOT / "dsv41_dist", tmp_path / "dsv41_dist", ignore=shutil.ignore_patterns("__pycache__", "comm"))
    assert door("print('on')", {}, f"{DOOR}:{copy}").stdout.strip() == "on"
    result = door("print('on')", FENCE, f"{DOOR}:{copy}")
    # With a gate set, two different installations are a refusal, not a matter of luck.
    assert (result.returncode, result.stdout) == (1, "")
    assert "cannot be armed" in result.stderr


def test_a_package_that_does_not_import_ends_the_interpreter(tmp_path):
    shutil.copytree(ROOT / "dsv41_dist", tmp_path / "dsv41_dist", ignore=shutil.ignore_patterns("__pycache__", "comm"))
    (tmp_path / "dsv41_dist" / "adapters" / "__init__.py").write_text("import not_there\n")
    door_there = str(tmp_path / "dsv41_dist" / "sitecustomize")
    by_plugin = "from dsv41_dist.sitecustomize.sitecustomize import arm\ntry:\n    arm()\nexcept Exception:\n    pass\n"
    for code, path in (("", door_there), (by_plugin, str(tmp_path))):
        result = door(code + "print('went on')", FENCE, path)
        assert (result.returncode, result.stdout) == (1, "")
        assert "No module named 'not_there'" in result.stderr


def test_two_doors_at_once_and_from_many_threads_arm_once():
    code = f"""
import sys, threading
from dsv41_dist.sitecustomize.sitecustomize import arm
gate = threading.Barrier(8)
def work():
    gate.wait()
    arm()
threads = [threading.Thread(target=work) for _ in range(8)]
[t.start() for t in threads]; [t.join(30) for t in threads]
arm()
print({HOOKS})
"""
    for path in (f"{DOOR}:{ROOT}", str(ROOT)):
        result = door(code, FENCE, path)
        assert result.stdout.strip() == "1", result.stderr


@pytest.mark.parametrize(
    ("change", "gate"),
    [
        ("os.environ['DSV41_COMM_CHECK'] = '1'", "DSV41_COMM_CHECK"),
        ("del os.environ['DSV41_FOLDED_FENCE']", "DSV41_FOLDED_FENCE"),
    ],
)
def test_gates_that_changed_between_the_doors_are_refused(change, gate):
    code = "import os; from dsv41_dist.sitecustomize.sitecustomize import arm; arm(); "
    code += f"{change}; arm(); print('went on')"
    result = door(code, FENCE, f"{DOOR}:{ROOT}")
    assert (result.returncode, result.stdout) == (1, "")
    assert f"gates changed after they were read: {gate}" in result.stderr


START = """
from dsv41_dist.engine import armed, boot
from dsv41_dist.adapters import REGISTRY
starts = []
def start(self):
    starts.append(self)
    {body}
armed.Armed.start = start
"""


def test_an_import_that_fails_while_arming_is_final():
    code = START.format(body="raise ImportError('half imported')") + SWALLOWED + "boot.arm(REGISTRY)"
    for attempt in (code, code.replace("except Exception", "except BaseException")):
        result = door(attempt, FENCE, str(ROOT))
        assert result.returncode == 1
        assert "dsv41_dist refuses to go on: arming failed: ImportError: half imported" in result.stderr


def test_a_door_that_is_met_while_arming_arms_nothing_again():
    code = START.format(body="boot.arm(REGISTRY)") + "print(boot.arm(REGISTRY), len(starts))"
    assert door(code, FENCE, str(ROOT)).stdout.strip() == "True 1"


@pytest.mark.parametrize("flag", ["-I", "-E", "-S"])
def test_interpreters_that_ignore_the_door_are_told_so(flag):
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); "
    code += "from dsv41_dist.sitecustomize.sitecustomize import arm; arm(); print('went on')"
    result = door(code, FENCE, args=(flag,))
    assert (result.returncode, result.stdout) == (1, "")
    assert "-I, -E or -S, which is not supported" in result.stderr
    assert door(code, {}, args=(flag,)).stdout.strip() == "went on"


def test_a_refusal_at_one_door_is_final_at_the_other():
    code = """
import os
from dsv41_dist.sitecustomize.sitecustomize import arm
os.environ["DSV41_FOLDED_FENCE"] = "x"
try:
    arm()
except BaseException:
    pass
os.environ["DSV41_FOLDED_FENCE"] = "1"
arm()
print("went on")
"""
    result = door(code, {}, str(ROOT))
    assert (result.returncode, result.stdout) == (1, "")


FULL = "import sys\nsys.stderr = open('/dev/full', 'w')\n"


@pytest.mark.parametrize("value", ["maybe", "1"])
def test_a_door_that_cannot_say_why_it_refuses_still_refuses(value):
    broken = "import dsv41_dist\ndsv41_dist.__file__ = '/elsewhere/dsv41_dist/__init__.py'\n" if value == "1" else ""
    result = door(FULL + broken + SWALLOWED, {"DSV41_FOLDED_FENCE": value}, str(ROOT))
    assert result.returncode != 0
    assert result.stdout == ""
