"""What is recorded of a forward, without an engine."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from dsv41_dist.rehearsal import recorder


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """Record one forward's output as rank 0; gives the entry."""
    monkeypatch.setenv(recorder.RECORD, str(tmp_path))
    monkeypatch.setattr(recorder, "_rank", lambda: 0)
    monkeypatch.setattr(recorder, "_files", {})
    batch = SimpleNamespace(
        forward_mode=SimpleNamespace(name="TARGET_VERIFY"), input_ids=torch.zeros(5, dtype=torch.long), batch_size=1
    )

    def record(draft: bool, **output) -> dict:
        logits_output = SimpleNamespace(**output)
        recorder._write(SimpleNamespace(is_draft_worker=draft), batch, SimpleNamespace(logits_output=logits_output))
        return json.loads((tmp_path / "rank0.jsonl").read_text().splitlines()[-1])

    return record


def test_a_draft_without_logits_is_recorded_by_its_hidden_states(recorded):
    hidden = torch.arange(20.0).reshape(5, 4).to(torch.bfloat16)
    one = recorded(True, next_token_logits=None, hidden_states=hidden)
    assert (len(set(one["logits"])), one["top"][0]) == (5, [3, 3.0, 2.0])
    hidden.view(torch.int16)[2, 0] ^= 1
    other = recorded(True, next_token_logits=None, hidden_states=hidden)
    assert [a == b for a, b in zip(one["logits"], other["logits"], strict=True)] == [True, True, False, True, True]


def test_where_there_are_logits_they_are_recorded(recorded):
    logits = torch.eye(5)
    one = recorded(False, next_token_logits=logits, hidden_states=torch.zeros(5, 4))
    assert one["logits"] == recorded(False, next_token_logits=logits, hidden_states=torch.ones(5, 4))["logits"]
    assert one["top"][3] == [3, 1.0, 0.0]


def test_nothing_is_made_up_where_there_is_neither(recorded):
    assert recorded(False, next_token_logits=None, hidden_states=None)["logits"] == []


def test_nan_is_the_largest_value(recorded):
    """The comparison looks for it there."""
    _, largest, _ = recorded(False, next_token_logits=torch.tensor([[1.0, float("nan"), 3.0]]))["top"][0]
    assert largest != largest
