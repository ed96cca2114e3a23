"""The other door: the entry point, found and called by the engine's own loader, in all three releases."""

from __future__ import annotations

import json
from functools import partial

import pytest

from tests.engine.real import RELEASES, engine_env, run_engine

CODE = """
import json, sys
from sglang.srt.distributed import parallel_state            # already imported when the door opens
copy, before = parallel_state.initialize_model_parallel, id(parallel_state.initialize_model_parallel)
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.speculative.dspark_components import dspark_verify
from dsv41_dist.engine import boot
armed = boot.armed()
print(json.dumps({
    "hooks": sum(type(f).__name__ == "Hook" for f in sys.meta_path),
    "patched": armed and armed.states["folded_result_fence"].status(),
    "group": hasattr(parallel_state.initialize_model_parallel, "__wrapped__"),
    "verify": armed and armed.hook.verify(),
    "stock": id(parallel_state.initialize_model_parallel) == before,
    "stale": copy is not parallel_state.initialize_model_parallel,
}))
"""


@pytest.fixture
def installed(tmp_path):
    """What installing this package leaves for the engine's loader: metadata with the entry point."""
    info = tmp_path / "dsv41_dist-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.4\nName: dsv41-dist\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\ndsv41 = dsv41_dist.sitecustomize.sitecustomize:arm\n")
    return tmp_path


def loaded(run, tree, installed, door=False, **env):
    full = engine_env(tree, door=door, **env)
    full["PYTHONPATH"] += f":{installed}"
    return run(["-c", CODE], full)


@pytest.mark.parametrize("release", RELEASES)
def test_the_engines_loader_arms(warm_engine, published, installed, release):
    result = loaded(warm_engine.run, published(release), installed, DSV41_FOLDED_FENCE="1")
    assert result.returncode == 0, result.stderr[-3000:]
    seen = json.loads(result.stdout.splitlines()[-1])
    assert seen == {"hooks": 1, "patched": "installed", "group": True, "verify": [], "stock": False, "stale": False}


def test_both_doors_arm_once(engine_python, published, installed):
    run = partial(run_engine, engine_python)  # a real start: Python itself opens the first door
    result = loaded(run, published("0.5.23"), installed, door=True, DSV41_FOLDED_FENCE="1")
    assert result.returncode == 0, result.stderr[-3000:]
    seen = json.loads(result.stdout.splitlines()[-1])
    # The sitecustomize door was open first, so there was never a stock function to keep.
    assert seen == {"hooks": 1, "patched": "installed", "group": True, "verify": [], "stock": True, "stale": False}


def test_without_a_gate_the_loader_leaves_the_engine_alone(warm_engine, published, installed):
    result = loaded(warm_engine.run, published("0.5.23"), installed)
    seen = json.loads(result.stdout.splitlines()[-1])
    assert seen == {"hooks": 0, "patched": None, "group": False, "verify": None, "stock": True, "stale": False}


def test_the_loader_swallows_exceptions_but_not_a_refusal(warm_engine, published, installed):
    result = loaded(warm_engine.run, published("0.5.23"), installed, DSV41_FOLDED_FENCE="maybe")
    assert (result.returncode, result.stdout) == (1, "")
    assert "DSV41_FOLDED_FENCE='maybe'" in result.stderr


def test_an_allow_list_without_us_closes_this_door(warm_engine, published, installed):
    env = {"DSV41_FOLDED_FENCE": "1", "SGLANG_PLUGINS": "somebody_else"}
    result = loaded(warm_engine.run, published("0.5.23"), installed, **env)
    assert json.loads(result.stdout.splitlines()[-1])["hooks"] == 0
    result = loaded(warm_engine.run, published("0.5.23"), installed, **{**env, "SGLANG_PLUGINS": "dsv41"})
    assert json.loads(result.stdout.splitlines()[-1])["hooks"] == 1
