"""Marks what needs the engine's interpreter; `rehearsals` boots engines, a minute or two each."""

from __future__ import annotations

import pytest

from .fixture import rehearsal_python, rehearsals

__all__ = ["rehearsal_python", "rehearsals"]


def pytest_collection_modifyitems(items):
    for item in items:
        names = getattr(item, "fixturenames", ())
        if "rehearsals" in names:
            # A whole set of boots may stand behind the first test that asks for it.
            item.add_marker(pytest.mark.timeout(1500))
        if "rehearsal_python" in names or "rehearsals" in names:
            item.add_marker(pytest.mark.engine)
