"""The private folder and the file that four ranks write at once. The transformation itself: tests/engine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dsv41_dist.adapters import _router_live_source as source

ROOT = Path(__file__).parents[3]


def stand_in(tail: str = "") -> str:
    """A text that has every anchor once and is a Python module."""
    body = "".join(f'A{number} = r"""\n{old}"""\n' for number, (old, _) in enumerate(source.ANCHORS))
    return body + "VALUE = 7\n" + tail


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(source.tempfile, "gettempdir", lambda: str(tmp_path))
    return tmp_path


def test_it_is_imported_from_a_real_file_of_this_user_alone(temporary):
    module = source.load(stand_in())
    file = Path(module.__file__)
    assert module.VALUE == 7
    assert file.parent == temporary / f"dsv41_dist-{os.getuid()}"
    assert file.parent.stat().st_mode & 0o777 == 0o700
    assert file.read_text() == source.transform(stand_in())
    assert source.load(stand_in()) is module
    assert source.load(stand_in("OTHER = 1\n")) is not module


def test_a_file_with_other_content_is_replaced(temporary):
    first = source.load(stand_in("X = 1\n"))
    file = Path(first.__file__)
    file.write_text("VALUE = 'not ours'\n")
    del sys.modules[first.__name__]
    assert source.load(stand_in("X = 1\n")).VALUE == 7


@pytest.mark.parametrize("kind", ["open to others", "a link"])
def test_a_folder_that_others_can_write_to_is_refused(temporary, kind):
    folder = temporary / f"dsv41_dist-{os.getuid()}"
    if kind == "a link":
        (temporary / "elsewhere").mkdir()
        folder.symlink_to(temporary / "elsewhere")
    else:
        folder.mkdir()
        folder.chmod(0o777)
    with pytest.raises(PermissionError, match="no one else can write to"):
        source.load(stand_in(f"KIND = {kind!r}\n"))


def test_a_module_that_fails_leaves_nothing_behind(temporary):
    with pytest.raises(ZeroDivisionError):
        source.load(stand_in("1 / 0\n"))
    assert not any(str(temporary) in str(getattr(module, "__file__", "")) for module in list(sys.modules.values()))
    with pytest.raises(ZeroDivisionError):
        source.load(stand_in("1 / 0\n"))


def test_ranks_that_race_all_import_a_whole_file(tmp_path):
    code = (
        "from tests.unit.speculative.test_router_source import stand_in\n"
        "from dsv41_dist.adapters import _router_live_source as s\n"
        "for n in range(30): assert s.load(stand_in(f'N = {n}\\n' + '#' * 20000 + '\\n')).N == n\n"
    )
    env = os.environ | {"TMPDIR": str(tmp_path)}
    ranks = [subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=env) for _ in range(4)]
    assert [rank.wait(timeout=60) for rank in ranks] == [0] * 4
    (folder,) = tmp_path.iterdir()
    assert len(list(folder.glob("*.py"))) == 30
    assert not list(folder.glob("*.partial"))
