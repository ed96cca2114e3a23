"""Where the real engine is. Tests run it in processes of its own interpreter; this one needs no engine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dsv41_dist.engine.survey import cache_folder
from tests.engine.real import ROOT, engine_env
from tests.warm import Warm

HERE = Path(__file__).parent
# What every release imports beside itself, in seven seconds of ten.
BESIDE_THE_ENGINE = (
    "torch._inductor.compile_fx",
    "transformers.models.auto.modeling_auto",
    "openai",
    "compressed_tensors",
    "fastapi",
    "xgrammar",
    "aiohttp",
    "requests",
    "zmq",
)
TODO = "run launch/engine_env.sh and set DSV41_ENGINE_PYTHON to the path it prints"


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(item.fspath).is_relative_to(HERE):
            item.add_marker(pytest.mark.engine)


def missing(what: str) -> None:
    """A run that must have the engine fails without it; any other says that it did not test."""
    text = f"{what}: {TODO}"
    if os.environ.get("DSV41_REQUIRE_ENGINE", "").lower() in ("1", "on", "true"):
        pytest.fail(text, pytrace=False)
    pytest.skip(text)


@pytest.fixture(scope="session")
def engine_python() -> str:
    python = os.environ.get("DSV41_ENGINE_PYTHON") or sys.executable
    code = "import importlib.util as u, sys; sys.exit(u.find_spec('sglang') is None or u.find_spec('torch') is None)"
    try:
        found = subprocess.run([python, "-c", code], capture_output=True, timeout=60, check=False).returncode == 0
    except OSError:
        found = False
    if not found:
        missing(f"{python} has no sglang")
    return python


@pytest.fixture(scope="session")
def warm_engine(engine_python):
    """The engine's interpreter without an engine, forked for each probe: a probe imports the engine itself."""
    with Warm(engine_python, BESIDE_THE_ENGINE, engine_env(ROOT, door=False)) as warm:
        yield warm


@pytest.fixture(scope="session")
def published():
    """release -> folder of the unpacked wheel as published."""

    def folder(release: str) -> Path:
        path = cache_folder() / "engines" / release
        if not (path / "sglang" / "__init__.py").is_file():
            missing(f"{path} is not an unpacked sglang {release} wheel")
        return path

    return folder
