from __future__ import annotations

import pytest

from .toy import Toy


@pytest.fixture
def toy(tmp_path):
    return Toy(tmp_path)
