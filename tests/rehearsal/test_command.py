"""What the command says of its arguments, with made-up boots in the engine's place."""

from __future__ import annotations

import pytest

from dsv41_dist.cli import rehearse as command
from dsv41_dist.comm.errors import ArgumentError
from dsv41_dist.rehearsal.verdict import Outcome


def boot(python, boot, name, **how) -> Outcome:
    entry = {"mode": "EXTEND", "draft": False, "rows": 2, "requests": 2, "logits": ["a"], "top": [[5, 9.0, 8.0]]}
    stages = [
        {"name": stage.name, "sampled": False, "tokens": [[1] * stage.new_tokens], "cached": [0]}
        | {"new_tokens": stage.new_tokens}
        for stage in boot.stages
    ]
    return Outcome(name, boot.tp, stages=stages, ranks={rank: [entry] for rank in range(boot.tp)})


@pytest.fixture
def rehearsed(monkeypatch, capsys):
    monkeypatch.setattr(command, "engine_python", lambda tree="": "python")
    monkeypatch.setattr(command, "make_checkpoint", lambda *given: None)
    monkeypatch.setattr(command, "boot_engine", boot)

    def run(**given) -> tuple[int, str]:
        status = command.rehearse(**given)
        return status, capsys.readouterr().out

    return run


@pytest.mark.parametrize("gates", ["DSV41_PREFILL_SP_EXACT=1", "DSV41_HC_FUSED=0", "DSV41_COMM_CHECK=1"])
def test_gates_that_turn_no_adapter_on_are_said_and_must_fire_fails(rehearsed, gates):
    said = "the gates turn no adapter on; `adapters` lists those that do"
    status, out = rehearsed(gates=gates)
    assert status == 0
    assert f"note: {said}" in out
    status, out = rehearsed(gates=gates, must_fire=True)
    assert status == 1
    assert f"- {said}" in out


def test_no_gates_are_no_problem(rehearsed):
    status, out = rehearsed(must_fire=True)
    assert status == 0
    assert "turn no adapter on" not in out


@pytest.mark.parametrize(
    ("gates", "said"),
    [
        ("DSV41_PREFILL_SP=1 DSV41_PREFILL_SP=0", "--gates: DSV41_PREFILL_SP is given twice, as '1' and as '0'"),
        ("DSV41_DRAFT_TAU='0.8", '--gates "DSV41_DRAFT_TAU=\'0.8": No closing quotation'),
    ],
)
def test_gates_that_can_be_read_in_two_ways_are_refused(gates, said):
    with pytest.raises(ArgumentError, match=said):
        command.parse_gates(gates)


@pytest.mark.parametrize("error", [RuntimeError, OSError])
def test_a_checkpoint_that_cannot_be_written_is_refused_with_its_folder(rehearsed, monkeypatch, error):
    def fail(*given):
        raise error("no room in /there")

    monkeypatch.setattr(command, "make_checkpoint", fail)
    with pytest.raises(ArgumentError, match="no room in /there; XDG_CACHE_HOME names the folder for it"):
        rehearsed()
