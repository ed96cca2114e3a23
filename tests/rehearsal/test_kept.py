"""A boot's result is kept under a key over everything it depended on."""

from __future__ import annotations

import pytest

from dsv41_dist.rehearsal.settings import Boot
from tests.rehearsal import fixture


@pytest.fixture
def key(tmp_path, monkeypatch):
    """Write files under a made-up package, plugin, engine and checkpoint; gives the key of a boot with them."""
    for name in ("checkpoint/rehearsal.digest", "dsv41_dist/a.py", "plugin/b.py", "tree/sglang/c.py"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("1")
    monkeypatch.setattr(fixture, "PACKAGE_ROOT", tmp_path)
    rehearsals = object.__new__(fixture.Rehearsals)
    rehearsals._release = "0.5.23 2.13"
    paths = {"extra_path": (str(tmp_path / "plugin"),), "tree": str(tmp_path / "tree")}
    boot = Boot(str(tmp_path / "checkpoint"), (), **paths)

    def of(name: str = "", text: str = "") -> str:
        if name:
            file = tmp_path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return rehearsals._key(boot)

    return of


@pytest.mark.parametrize(
    "name",
    [
        "dsv41_dist/engine/releases/0.5.23.json",
        "plugin/b-0.dist-info/entry_points.txt",
        "plugin/b.py",
        "tree/sglang/c.py",
    ],
)
def test_what_a_boot_depends_on_changes_its_key(key, name):
    keys = [key(), key(name, "2"), key(name, "3")]
    assert len(set(keys)) == 3


def test_a_file_of_another_name_changes_the_key(key, tmp_path):
    before = key()
    (tmp_path / "dsv41_dist/a.py").rename(tmp_path / "dsv41_dist/b.py")
    assert key() != before


def test_bytecode_does_not(key):
    assert key() == key("dsv41_dist/__pycache__/a.cpython-311.pyc", "2")
