"""doctor says what boot would do: the rows of a survey against the problems that boot would refuse with."""

from __future__ import annotations

import pytest

from dsv41_dist.engine import drift
from dsv41_dist.engine.armed import Armed, enabled
from dsv41_dist.engine.gates import Gates
from dsv41_dist.engine.survey import survey
from dsv41_dist.engine.symbols import Target
from dsv41_dist.engine.tree import EngineTree
from tests.unit.engine.toy import TARGETS, Toy


class Spec:
    guarantee = "bit-identical"

    def __init__(self, *targets, native=(), default=False):
        self.name, self.targets, self.default = "folded_result_fence", targets, default
        self.native = dict.fromkeys(native, "--theirs")

    def by_default(self, gates):
        return self.default


@pytest.fixture
def asked(toy: Toy, monkeypatch):
    """(the spec's row, what boot says of it) on the toy engine."""
    monkeypatch.setattr(drift, "FOLDER", toy.releases)
    monkeypatch.setattr(Armed, "targets", ())
    drift.recorded.cache_clear()

    def ask(spec, **env):
        tree, gates = EngineTree.at(toy.root), Gates.from_env(env or {"DSV41_FOLDED_FENCE": "1"})
        row = next(row for row in survey(tree, [spec], gates) if row.name == spec.name)
        return row, Armed(gates, [spec] if spec.name in enabled(gates, [spec]) else []).problems(tree)

    yield ask
    drift.recorded.cache_clear()


def test_as_published(asked):
    row, problems = asked(Spec(*TARGETS))
    assert (row.status, row.refused, problems) == ("applies", False, [])


def test_a_native_adapter_is_checked_where_it_has_targets(asked, toy):
    row, problems = asked(Spec(*TARGETS, native=["9.9.1"]))
    assert (row.status, row.detail, row.refused, problems) == ("native", "use the engine's own: --theirs", False, [])
    assert {finding.status for finding in row.findings} == {"same"}
    row, problems = asked(Spec(Target("sglang.ops", "scale", ("9.9.0",)), native=["9.9.1"]))
    assert (row.status, row.refused, problems) == ("native", False, [])
    toy.edit("sglang/ops.py", "return x * by", "return x * by + 0")
    row, problems = asked(Spec(*TARGETS, native=["9.9.1"]))
    assert (row.status, row.refused, len(problems)) == ("drifted", True, 1)
    assert problems[0].startswith("folded_result_fence: drifted: sglang.ops:scale differs")


def test_an_adapter_without_a_target_in_this_release_is_refused(asked):
    row, problems = asked(Spec(Target("sglang.ops", "scale", ("9.9.0",))))
    assert (row.status, row.refused) == ("absent", True)
    assert problems == ["folded_result_fence: absent: this release has none of its targets"]


def test_no_adapter_is_on_by_default_when_no_variable_is_set(asked):
    spec = Spec(*TARGETS, default=True)
    assert not asked(spec, OTHER="1")[0].is_set
    assert asked(spec, DSV41_COMM_CHECK="1")[0].is_set
