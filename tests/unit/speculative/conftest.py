"""Where Triton is. Its kernels run in the interpreter: no GPU needed, but triton and TRITON_INTERPRET=1."""

from __future__ import annotations

import importlib.util
import os

import pytest


@pytest.fixture(scope="session")
def interpreter():
    """Skips, and says so, where the kernels cannot run here; a run that must have them fails instead."""
    if importlib.util.find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1":
        return
    text = "the Triton kernels were not run: use an interpreter that has triton, with TRITON_INTERPRET=1"
    if os.environ.get("DSV41_REQUIRE_ENGINE", "").lower() in ("1", "on", "true"):
        pytest.fail(text, pytrace=False)
    pytest.skip(text)
