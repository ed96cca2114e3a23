from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from toy import Toy


@pytest.fixture
def toy(tmp_path):
    return Toy(tmp_path)
