"""The twin: degenerate rows, the noise, the law of what it emits, and arguments that do not fit."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv41_dist.kernels.block_verify import NoiseState, block_laws, block_verify, block_verify_torch
from tests.unit.speculative.exact import Tables
from tests.unit.speculative.test_exactness import Logits

INF, NAN = math.inf, math.nan


def verify(target, draft, drafts, coins=None, live=None, key=1, temperature=1.0):
    """One request from [g + 1, V] target logits and [g, V] draft logits (or None)."""
    drafts = torch.tensor([drafts])
    return block_verify(
        candidates=torch.cat([torch.zeros(1, 1, dtype=torch.int64), drafts], 1),
        target=torch.as_tensor(target, dtype=torch.float32),
        draft_logits=None if draft is None else torch.as_tensor(draft, dtype=torch.float32)[None],
        target_temperatures=torch.tensor([temperature]),
        draft_temperatures=torch.tensor([temperature]),
        noise=NoiseState(key, "cpu"),
        live=None if live is None else torch.tensor([live], dtype=torch.int32),
        coins=None if coins is None else torch.tensor([coins]),
    )


def test_equal_laws_accept_everything():
    logits = torch.randn(4, 7)
    verdict = verify(logits, logits[:3], [1, 2, 3], coins=[0.999999] * 3)
    assert verdict.correct_len.tolist() == [3]
    assert verdict.weights.tolist() == [[1.0] * 4]
    assert verdict.thresholds.tolist() == [[1.0] * 4]


@pytest.mark.parametrize("temperature", [1e-5, 0.3, 5.0])
def test_a_draft_that_the_target_cannot_emit_is_never_accepted(temperature):
    target = torch.zeros(3, 5)
    target[:, 2] = -INF
    for key in range(20):
        verdict = verify(target, torch.zeros(2, 5), [2, 1], coins=[0.0, 0.0], key=key, temperature=temperature)
        assert verdict.correct_len.tolist() == [0]
        assert int(verdict.bonus) != 2


def test_a_weight_may_rise_again_after_a_draft_that_the_target_likes_less():
    # The gain over the token rule: the second draft makes up for the first.
    target = torch.tensor([[0.25, 0.75], [0.9, 0.1], [0.5, 0.5]]).log()
    draft = torch.tensor([[0.5, 0.5], [0.45, 0.55]]).log()
    verdict = verify(target, draft, [0, 0], coins=[0.9, 0.9])
    torch.testing.assert_close(verdict.weights, torch.tensor([[1.0, 0.5, 1.0]]))
    assert verdict.correct_len.tolist() == [2]


def test_disjoint_supports_emit_from_the_target():
    target, draft = torch.full((3, 4), -INF), torch.full((2, 4), -INF)
    target[:, :2], draft[:, 2:] = 0.0, 0.0
    for key in range(20):
        verdict = verify(target, draft, [2, 3], coins=[0.0, 0.0], key=key)
        assert verdict.correct_len.tolist() == [0]
        assert int(verdict.bonus) in (0, 1)


@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_draft_law_that_is_none_is_rejected_and_counts_as_zero(bad):
    draft = torch.zeros(2, 4)
    draft[0, 1] = bad
    target = torch.full((3, 4), -INF)
    target[:, 3] = 0.0
    for key in range(5):
        verdict = verify(target, draft, [3, 3], coins=[0.0, 0.0], key=key)
        assert (verdict.correct_len.tolist(), verdict.bonus.tolist()) == ([0], [3])


def test_an_argmax_draft_is_accepted_with_the_target_s_probability():
    probs = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.6, 0.3], [0.2, 0.2, 0.6]])
    verdict = verify(probs.log(), None, [0, 1], coins=[0.0, 0.0])
    torch.testing.assert_close(verdict.weights, torch.tensor([[1.0, 0.5, 0.3]]))
    # S_1 = w_1 (1 - p_1(x_2)) = 0.5 * 0.4; h_1 = 0.2 / (0.2 + 0.5)
    torch.testing.assert_close(verdict.thresholds, torch.tensor([[1.0, 0.2 / 0.7, 0.3]]))
    for key in range(20):
        rejected = verify(probs.log(), None, [0, 1], coins=[1.0, 1.0], key=key)
        assert rejected.correct_len.tolist() == [0]
        assert int(rejected.bonus) != 0


def test_the_correction_is_never_outside_the_target_s_support():
    """Rounding can leave nothing of w p - q; the stock kernel then emits the last token of the vocabulary."""
    p = torch.tensor([[[0.5, 0.5, 0.0], [0.5, 0.5, 0.0]]])
    q = torch.tensor([[[0.6, 0.6, 0.0]]])  # as if rounded up: no excess anywhere
    _, _, correction = block_laws(p, q, torch.tensor([[0]]))
    assert correction[0, 0].tolist() == [0.5, 0.5, 0.0]


def test_a_live_length_ends_the_block():
    logits = torch.randn(5, 6)
    for live in (2, 3, 4):
        verdict = verify(logits, logits[:4], [1, 2, 3, 4], coins=[0.5] * 4, live=live)
        assert verdict.correct_len.tolist() == [live - 1]
        assert verdict.weights[0, live:].tolist() == [0.0] * (5 - live)
        garbage = torch.cat([logits[:live], torch.full((5 - live, 6), NAN)])
        again = verify(garbage, logits[:4], [1, 2, 3, 4], coins=[0.5] * 4, live=live)
        assert (again.correct_len.tolist(), again.bonus.tolist()) == ([live - 1], verdict.bonus.tolist())


def test_the_noise_goes_one_step_a_call_and_is_the_key_s():
    logits = torch.randn(3, 50)
    noise, twin = NoiseState(77, "cpu"), NoiseState(77, "cpu")
    kwargs = {
        "candidates": torch.tensor([[0, 1, 2]]),
        "target": logits,
        "draft_logits": torch.randn(1, 2, 50),
        "target_temperatures": torch.ones(1),
        "draft_temperatures": torch.ones(1),
    }
    said = [block_verify(noise=noise, **kwargs).bonus.item() for _ in range(30)]
    assert noise.state.tolist() == [77, 30]
    assert [block_verify(noise=twin, **kwargs).bonus.item() for _ in range(30)] == said
    assert len(set(said)) > 5
    other = NoiseState(78, "cpu")
    assert [block_verify(noise=other, **kwargs).bonus.item() for _ in range(30)] != said


@pytest.mark.parametrize("seed", range(3))
def test_what_it_emits_has_the_target_s_law(seed):
    """Chi-square of 120,000 whole runs (drafts from q, coins and correction from the noise) against the target."""
    vocab, drafts, runs = 3, 2, 120_000
    tables = Tables(Logits(vocab, seed).at(0.8), Logits(vocab, 100 + seed).at(1.1), vocab, drafts)
    gen = torch.Generator().manual_seed(seed)
    path = torch.multinomial(tables.drawn(), runs, replacement=True, generator=gen)
    verdict = block_verify_torch(
        candidates=torch.cat([torch.zeros(runs, 1, dtype=torch.int64), tables.paths[path]], 1),
        target=tables.target_rows[path].float(),
        draft_logits=tables.draft_rows[path].log().float(),
        target_temperatures=None,
        draft_temperatures=torch.ones(runs),
        noise=NoiseState(seed, "cpu"),
    )
    tau = verdict.correct_len.long()
    tokens = torch.cat([tables.paths[path], torch.full((runs, 1), -1)], 1)
    tokens.scatter_(1, tau[:, None], verdict.bonus[:, None])
    # What a run did not emit is completed from the target, so that all runs have drafts + 1 tokens.
    for i in range(1, drafts + 1):
        todo = tau < i
        prefix = sum(tokens[todo, k] * vocab ** (i - 1 - k) for k in range(i))
        tokens[todo, i] = torch.multinomial(tables.p[i][prefix], 1, generator=gen).squeeze(1)
    counts = torch.zeros(vocab ** (drafts + 1), dtype=torch.float64)
    code = sum(tokens[:, k] * vocab ** (drafts - k) for k in range(drafts + 1))
    counts.index_add_(0, code, torch.ones(runs, dtype=torch.float64))
    wanted = torch.ones(1, dtype=torch.float64)
    for level in tables.p:
        wanted = (wanted[:, None] * level).reshape(-1)
    chi2 = float(((counts - runs * wanted) ** 2 / (runs * wanted)).sum())
    assert chi2 < 54.05  # 0.1 % point of 26 degrees of freedom; the seeds are fixed


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 5), st.integers(2, 9), st.floats(0.01, 3.0), st.booleans())
def test_laws_hold_for_any_rows(seed, gamma, vocab, sharpness, zeros):
    gen = torch.Generator().manual_seed(seed)
    p = torch.softmax(torch.randn(3, gamma + 1, vocab, generator=gen, dtype=torch.float64) / sharpness, -1)
    q = torch.softmax(torch.randn(3, gamma, vocab, generator=gen, dtype=torch.float64) / sharpness, -1)
    if zeros:
        p[..., 0] = 0
        p = p / p.sum(-1, keepdim=True)
    x = torch.randint(0, vocab, (3, gamma), generator=gen)
    w, h, correction = block_laws(p, q, x)
    assert ((h >= 0) & (h <= w + 1e-12) & (w <= 1)).all()
    assert ((correction > 0) <= (p > 0)).all()
    assert (correction.sum(-1) > 0).all()


GOOD = {
    "candidates": torch.zeros(2, 3, dtype=torch.int64),
    "target": torch.zeros(6, 5),
    "draft_logits": torch.zeros(2, 2, 5),
    "target_temperatures": torch.ones(2),
    "draft_temperatures": torch.ones(2),
}
BAD = [
    ({"candidates": torch.zeros(2, 1, dtype=torch.int64)}, "candidates has 1 rows"),
    ({"target": torch.zeros(5, 5)}, r"target is \(5, 5\)"),
    ({"target": torch.zeros(5, 6).T}, "strides"),
    ({"draft_logits": torch.zeros(2, 2, 4)}, r"allowed is \[2, 2, 5\]"),
    ({"target_temperatures": torch.ones(3)}, "target_temperatures has 3 elements: allowed is 2"),
    ({"draft_temperatures": torch.ones(1)}, "draft_temperatures has 1 elements: allowed is 2"),
    ({"live": torch.ones(2, dtype=torch.int64)}, "live is torch.int64"),
    ({"candidates": torch.zeros(0, 3, dtype=torch.int64), "target": torch.zeros(0, 5)}, "candidates has 0 requests"),
    ({"target": torch.zeros(3, 2, 5)}, r"target is \(3, 2, 5\)"),
    ({"coins": torch.zeros(1, 2)}, r"coins is \(1, 2\): allowed is \[2, 2\]"),
    ({"coins": torch.zeros(2, 1)}, r"coins is \(2, 1\): allowed is \[2, 2\]"),
    *(
        ({name: value.to("meta")}, f"{name} is on meta: allowed is cpu")
        for name, value in (GOOD | {"live": torch.ones(2, dtype=torch.int32), "coins": torch.zeros(2, 2)}).items()
        if name != "target"
    ),
    ({"noise": NoiseState(1, "meta")}, "noise is on meta: allowed is cpu"),
]


@pytest.mark.parametrize(("change", "text"), BAD)
def test_arguments_that_do_not_fit(change, text):
    good = GOOD | {"noise": NoiseState(1, "cpu")}
    block_verify(**good)
    with pytest.raises(ValueError, match=text):
        block_verify(**(good | change))


def test_target_rows_may_be_a_part_of_more_rows():
    gen = torch.Generator().manual_seed(0)
    wide = torch.randn(2, 5, 7, generator=gen)
    args = {
        "candidates": torch.randint(0, 7, (2, 3), generator=gen),
        "draft_logits": torch.randn(2, 2, 7, generator=gen),
        "target_temperatures": torch.ones(2),
        "draft_temperatures": torch.ones(2),
    }
    of_a_part = block_verify(target=wide[:, :3], **args, noise=NoiseState(1, "cpu"))
    dense = block_verify(target=wide[:, :3].reshape(6, 7), **args, noise=NoiseState(1, "cpu"))
    assert all(torch.equal(a, b) for a, b in zip(of_a_part, dense, strict=True))
