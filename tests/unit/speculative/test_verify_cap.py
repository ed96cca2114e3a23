"""Live rows and row copies: the twins by definition, the kernels by the twins, and the state that graphs bake in."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv41_dist.adapters._speculative_live import LIVE, LiveState
from dsv41_dist.adapters.verify_cap import _Cap
from dsv41_dist.engine.state import AdapterState
from dsv41_dist.kernels.verify_cap import copy_rows, live_rows, source_rows

NAN = math.nan
VALUES = st.one_of(st.sampled_from([0.0, 0.25, 0.5, 1.0, NAN]), st.floats(0, 1, width=32))


def by_definition(confidence, thresholds) -> list[int]:
    out = []
    for row in confidence:
        length = 1
        for j, threshold in enumerate(thresholds, start=2):
            if not row[j - 1] >= threshold:
                break
            length = j
        out.append(length + 1)
    return out


@settings(max_examples=300, deadline=None)
@given(st.data(), st.integers(1, 6))
def test_live_rows_by_definition_and_causal(data, gamma):
    confidence = data.draw(st.lists(st.lists(VALUES, min_size=gamma, max_size=gamma), min_size=1, max_size=4))
    thresholds = data.draw(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=gamma - 1, max_size=gamma - 1))
    out = torch.zeros(len(confidence), dtype=torch.int32)
    got = live_rows(torch.tensor(confidence), torch.tensor(thresholds), out).tolist()
    # Thresholds and confidences are compared in float32, as on the device.
    wanted = by_definition(torch.tensor(confidence).tolist(), torch.tensor(thresholds).tolist())
    assert got == wanted
    assert all(2 <= rows <= gamma + 1 for rows in got)
    # Column c follows from x_1..x_c: columns from j on must not move [L >= i] for i <= j.
    for j in range(1, gamma):
        changed = torch.tensor(confidence)
        changed[:, j:] = data.draw(VALUES)
        again = live_rows(changed, torch.tensor(thresholds), torch.zeros_like(out)).tolist()
        assert [min(rows - 1, j) for rows in again] == [min(rows - 1, j) for rows in got]


def routing(rows, k, seed, wide):
    gen = torch.Generator().manual_seed(seed)
    weights = torch.rand(rows, k + wide, generator=gen)[:, :k]
    ids = torch.randint(-1, 384, (rows, k), generator=gen, dtype=torch.int32)
    return weights, ids, torch.randint(0, 1 << 30, (rows, k), generator=gen, dtype=torch.int32)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.integers(0, 30), st.booleans())
def test_dead_rows_take_their_anchor_s_routing_and_nothing_else_moves(live, in_use, packed):
    stride, k = 6, 4
    weights, ids, third = routing(len(live) * stride, k, len(live), 0)
    before = [weights.clone(), ids.clone(), third.clone()]
    copy_rows(
        weights, ids, third if packed else None, torch.tensor(live, dtype=torch.int32), stride, torch.tensor(in_use)
    )
    for row in range(len(weights)):
        dead = row % stride >= live[row // stride] and row < in_use
        source = row - row % stride if dead else row
        assert torch.equal(weights[row], before[0][source])
        assert torch.equal(ids[row], before[1][source])
        assert torch.equal(third[row], before[2][source if packed else row])


def test_arguments_that_do_not_fit():
    good = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match="thresholds has 3 elements: allowed is 4 for 5 drafts"):
        live_rows(torch.zeros(2, 5), torch.zeros(3), good)
    with pytest.raises(ValueError, match=r"out is torch\.int64"):
        live_rows(torch.zeros(2, 5), torch.zeros(4), good.long())
    weights, ids, _ = routing(11, 4, 0, 0)
    with pytest.raises(ValueError, match="weights has 11 rows: allowed is 2 requests x 6 rows"):
        copy_rows(weights, ids, None, good, 6)


def test_source_rows():
    live = torch.tensor([1, 4], dtype=torch.int32)
    assert source_rows(live, 6).tolist() == [0] * 6 + [6, 7, 8, 9, 6, 6]


def test_a_gate_routes_by_live_rows_only_inside_the_scope_and_at_its_size():
    live = LiveState()
    with pytest.raises(RuntimeError, match="before the DSpark worker was built"):
        live.rows(1)
    live.allocate(4, 6, 6, "cpu")
    assert live.of(24) is None
    with live.scope(2):
        assert live.of(13) is None
        assert live.of(24) is None
        assert live.of(12).data_ptr() == live.buffer.data_ptr()
        assert live.routed == 1
    assert live.of(12) is None
    with pytest.raises(KeyError), live.scope(1):
        raise KeyError
    assert live.of(6) is None
    # A batch larger than any graph has rows of its own, and keeps them from the draft to the accept.
    large = live.rows(9)
    large.fill_(3)
    assert live.rows(9).tolist() == [3] * 9
    assert live.buffer.tolist() == [6] * 4


def test_a_log_that_can_no_longer_be_written_is_said_once_and_serving_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(LIVE, "buffer", torch.full((4,), 4, dtype=torch.int32))
    folder = tmp_path / "gone"
    cap = _Cap(3, str(folder / "log"), AdapterState("verify_cap", ""), "0.5.23")
    cap._logs = True
    steps = []
    observe = cap.observe(lambda observers, **step: steps.append(step["bs"]))
    for _ in range(2):
        observe(None, bs=2, confidence=None, correct_len=torch.zeros(2))
    assert steps == [2, 2]
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert f"DSV41_VERIFY_CAP_LOG={folder / 'log'}" in said[0]
    folder.mkdir()
    observe(None, bs=2, confidence=None, correct_len=torch.zeros(2))
    assert not list(folder.iterdir())
