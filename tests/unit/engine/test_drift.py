"""Drift: what is recorded, what is found, what the diff shows."""

from __future__ import annotations

import zipfile

import pytest

from dsv41_dist.engine import drift
from dsv41_dist.engine.symbols import Target
from dsv41_dist.engine.tree import EngineNotFound, EngineTree
from tests.unit.engine.toy import FILES, TARGETS, Toy


@pytest.fixture
def known(toy, monkeypatch):
    monkeypatch.setattr(drift, "FOLDER", toy.releases)
    drift.recorded.cache_clear()
    yield toy
    drift.recorded.cache_clear()


def statuses(toy: Toy) -> list[str]:
    return [finding.status for finding in drift.check(EngineTree.at(toy.root), TARGETS)]


def test_the_engine_as_published_is_the_same_in_every_form(known):
    assert statuses(known) == ["same"] * 5
    for path in (known.root, known.root / "sglang", known.wheel):
        tree = EngineTree.at(path)
        assert tree.release == "9.9.1"
        assert {finding.status for finding in drift.check(tree, TARGETS)} == {"same"}


def test_no_engine_text_is_recorded(known):
    text = (known.releases / "9.9.1.json").read_text()
    assert "return" not in text
    assert "Multiply" not in text


def test_a_changed_line_is_shown_with_its_neighbours(known):
    known.edit("sglang/ops.py", "return x * by", "return x * by + 0")
    finding = drift.check(EngineTree.at(known.root), TARGETS)[0]
    assert finding.status == "drifted"
    assert "sglang.ops:scale differs from the published 9.9.1 (sglang/ops.py:5; here at line 5)" in finding.detail
    assert "+    return x * by + 0" in finding.diff
    assert any(row.startswith("-(1 published") for row in finding.diff)
    assert " def scale(x, *, by=2):" in finding.diff


def test_a_reference_gives_the_removed_line_its_text_only_if_it_is_the_published_one(known, tmp_path):
    published = Toy(tmp_path / "again")
    known.edit("sglang/ops.py", "return x * by", "return x * by + 0")
    tree = EngineTree.at(known.root)
    finding = drift.check(tree, TARGETS, lambda release: EngineTree.at(published.root))[0]
    assert "-    return x * by" in finding.diff
    published.edit("sglang/ops.py", "return x * by", "return by * x")
    finding = drift.check(tree, TARGETS, lambda release: EngineTree.at(published.root))[0]
    assert not any("by * x" in row for row in finding.diff)


def test_a_comment_or_layout_is_no_drift(known):
    known.edit("sglang/ops.py", "    return x * by", "    # explained\n\n    return x \\\n        * by  # here")
    known.edit("sglang/ops.py", '"""Multiply."""', '"""Multiply, of course."""')
    assert statuses(known) == ["same"] * 5


def test_a_changed_signature_is_named(known):
    known.edit("sglang/ops.py", "scale(x, *, by=2)", "scale(x, by=2)")
    assert "signature (x, by=), published (x, *, by=)" in drift.check(EngineTree.at(known.root), TARGETS)[0].detail


def test_absent_function_class_file_and_a_file_that_is_not_python(known):
    known.edit("sglang/ops.py", "def other(x)", "def another(x)")
    assert statuses(known) == ["same", "absent", "same", "same", "same"]
    file = known.root / "sglang/ops.py"
    file.write_text("def (:")
    assert statuses(known) == ["absent"] * 5
    file.unlink()
    assert statuses(known) == ["absent"] * 5


def test_an_unknown_release_is_never_the_same(known):
    version = known.root / "sglang/_version.py"
    for text in ("9.9.2", "9.9.1.post1", "9.9.1rc0", "../9.9.1"):
        version.write_text(f"__version__ = version = '{text}'\n")
        assert set(statuses(known)) == {"unknown release"}
    version.write_text("__version__ = version = '9.9.1+cu130'\n")
    assert set(statuses(known)) == {"same"}
    version.unlink()
    assert set(statuses(known)) == {"unknown release"}
    metadata = known.root / "sglang-9.9.1.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.4\nName: sglang\nVersion: 9.9.1\n")
    assert set(statuses(known)) == {"same"}


def test_targets_of_other_releases_are_left_out(known):
    later = [Target("sglang.ops", "not_yet", ("9.9.2",)), *TARGETS]
    assert len(drift.check(EngineTree.at(known.root), later)) == 5


def test_a_target_that_was_never_recorded_is_a_finding(known):
    finding = drift.check(EngineTree.at(known.root), [Target("sglang.user", "call")])[0]
    assert (finding.status, "never recorded" in finding.detail) == ("unknown release", True)


def test_recording_refuses_what_it_cannot_record(tmp_path, toy):
    with pytest.raises(EngineNotFound, match="no sglang-"):
        drift.write(tmp_path / "empty", TARGETS, tmp_path)
    with pytest.raises(ValueError, match=r"has no sglang\.ops:gone"):
        drift.record(toy.wheel, [Target("sglang.ops", "gone")])


@pytest.mark.parametrize("version", ["9.9.1.post1", "9.9.1rc2", "9.10.0", "10.0"])
def test_every_version_that_a_wheel_can_have_is_recorded_and_known(known, tmp_path, version):
    Toy(tmp_path / "later", {**FILES, "sglang/_version.py": f"__version__ = '{version}'\n"}, known.releases)
    assert drift.known_releases() == ["9.9.1", version]
    (known.root / "sglang/_version.py").write_text("__version__ = '9.9.2'\n")
    assert f"9.9.2 is not among 9.9.1, {version}" in drift.check(EngineTree.at(known.root), TARGETS)[0].detail


def test_a_wheel_that_does_not_say_its_version_is_not_recorded(tmp_path):
    with pytest.raises(EngineNotFound, match=r"sglang-9\.9\.1-py3-none-any\.whl does not say its version"):
        Toy(tmp_path, {**FILES, "sglang/_version.py": ""})
    assert not list((tmp_path / "releases").iterdir())


@pytest.mark.parametrize("name", ["sglang-9.9.1-py3-none-any.whl", "numpy-2.1.0-py3-none-any.whl"])
def test_a_wheel_that_is_no_engine_is_not_found(tmp_path, name):
    wheel = tmp_path / name
    wheel.write_bytes(b"half a download")
    with pytest.raises(EngineNotFound, match=f"{name} is no wheel"):
        EngineTree.at(wheel)
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("numpy/__init__.py", "")
        archive.writestr("numpy-2.1.0.dist-info/METADATA", "Name: numpy\nVersion: 2.1.0\n")
    with pytest.raises(EngineNotFound, match=f"no sglang/__init__.py in .*{name}"):
        EngineTree.at(wheel)


def test_the_digest_of_findings_follows_the_sources(known):
    tree = EngineTree.at(known.root)
    before = drift.digest(drift.check(tree, TARGETS))
    assert before == drift.digest(drift.check(EngineTree.at(known.wheel), list(reversed(TARGETS))))
    known.edit("sglang/ops.py", "return x + 1", "return x + 2")
    assert drift.digest(drift.check(tree, TARGETS)) != before


def test_reading_imports_nothing(known):
    code = "import sys; from dsv41_dist.engine.tree import EngineTree; t = EngineTree.installed(); "
    code += "sys.exit('sglang' in sys.modules or t.release != '9.9.1')"
    assert known.run(code).returncode == 0
    assert len(FILES) == 5


def test_every_known_release_records_every_target_of_the_registry():
    from dsv41_dist.adapters import REGISTRY
    from dsv41_dist.engine.survey import all_targets

    assert drift.known_releases() == ["0.5.21", "0.5.22", "0.5.23"]
    for release in drift.known_releases():
        entries = drift.recorded(release)
        assert entries is not None
        assert set(entries) == {target.key for target in all_targets(REGISTRY) if target.is_for(release)}
