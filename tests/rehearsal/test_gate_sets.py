"""The table of what the rehearsal does with each adapter, against the registry and the gates."""

from __future__ import annotations

import pytest

from dsv41_dist.adapters import REGISTRY
from dsv41_dist.engine.gate_table import GATES
from dsv41_dist.engine.gates import Gates
from dsv41_dist.rehearsal.gate_sets import ADAPTERS, cannot_fire, every_gate, left_out

NAMES = [adapter.name for adapter in REGISTRY]


@pytest.mark.parametrize("name", NAMES)
def test_every_adapter_is_rehearsed_or_left_out_with_a_reason(name):
    known = ADAPTERS[name]
    assert known.gates or known.silent
    if known.gates:
        assert Gates.from_env(known.gates).owners_on() == [name]


def test_the_table_names_no_adapter_that_the_gates_do_not_know():
    assert set(ADAPTERS) <= {gate.owner for gate in GATES if gate.switch}


def test_all_gates_at_once_turn_on_all_that_are_not_left_out():
    gates = every_gate(NAMES)
    on = Gates.from_env(gates).owners_on()
    assert sorted(on) == sorted(set(NAMES) - set(left_out(NAMES)))
    assert all(left_out(NAMES).values())


def test_an_adapter_without_a_line_is_left_out_and_said():
    assert every_gate(["new_one"]) == {}
    assert left_out(["new_one"]) == {"new_one": "rehearsal/gate_sets.py has no line for it"}
    assert cannot_fire("new_one") == ""
