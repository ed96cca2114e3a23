"""Kernel against twin, in Triton's interpreter. No test framework here: the engine's interpreter runs these too."""

from __future__ import annotations

import math

import torch

from dsv41_dist.kernels import block_verify_triton, verify_cap_triton
from dsv41_dist.kernels.block_verify import NoiseState, block_verify_torch
from dsv41_dist.kernels.verify_cap import copy_rows_torch, live_rows_torch

INF, NAN = math.inf, math.nan
KINDS = ("plain", "equal", "one-hot", "zeros", "top-1", "bf16", "live", "nan draft", "sharp", "probabilities")
KINDS += ("apart",)
GAMMAS = (1, 2, 3)
COPIES = tuple((packed, in_use) for packed in (False, True) for in_use in (None, 18))
_NAMES = ("candidates", "target", "draft_logits", "target_temperatures", "draft_temperatures")


def block_case(kind: str, gamma: int, bs: int = 4) -> int:
    """Two steps of `bs` requests, the first with given coins; returns how many decisions were compared."""
    vocab = 19
    gen = torch.Generator().manual_seed(gamma)
    target = 2 * torch.randn(bs, gamma + 1, vocab, generator=gen)
    draft = target[:, :gamma] + 0.7 * torch.randn(bs, gamma, vocab, generator=gen)
    t_temp, d_temp = torch.rand(bs, generator=gen) + 0.3, torch.rand(bs, generator=gen) + 0.3
    live = None
    if kind == "equal":
        draft, d_temp = target[:, :gamma].clone(), t_temp.clone()
    if kind == "sharp":  # within rounding of one-hot
        draft = torch.where(draft == draft.amax(-1, keepdim=True), draft + 40, draft)
        target[:, :gamma] = draft + torch.randn(bs, gamma, vocab, generator=gen)
    x = torch.multinomial(torch.softmax(draft / d_temp.view(-1, 1, 1), -1).view(-1, vocab), 1, generator=gen)
    x = x.view(bs, gamma)
    if kind == "one-hot":
        draft = None
    if kind == "zeros":
        target[..., ::2] = -INF
    if kind == "top-1":
        target = torch.where(target == target.amax(-1, keepdim=True), target, -INF)
    if kind == "bf16":
        target, draft = target.bfloat16(), draft.bfloat16()
    if kind == "live":
        live = torch.randint(2, gamma + 2, (bs,), generator=gen, dtype=torch.int32)
        target[torch.arange(gamma + 1)[None] >= live[:, None]] = NAN
    if kind == "nan draft":
        draft[1, 0, 3] = NAN
    if kind == "probabilities":  # after top-k and top-p
        target = torch.softmax(target, -1)
        target[..., ::3] = 0
        t_temp = None
    if kind == "apart":  # per-request values that are not next to each other
        t_temp, d_temp = torch.stack([t_temp, -t_temp], 1)[:, 0], d_temp[:1].expand(bs)
        live = torch.randint(2, gamma + 2, (bs, 1), generator=gen, dtype=torch.int32)
        live = torch.cat([live, torch.ones_like(live)], 1)[:, 0]
    candidates = torch.cat([torch.zeros(bs, 1, dtype=torch.int64), x], 1)
    ours, twin = NoiseState(gamma, "cpu"), NoiseState(gamma, "cpu")
    for step in range(2):
        coins = None if step else torch.rand(bs, gamma, generator=gen)
        # Rows of a wider buffer, and two tiles: what the engine and a real vocabulary have.
        wide = torch.cat([target.view(bs * (gamma + 1), vocab), torch.zeros(bs * (gamma + 1), 3)], 1)[:, :vocab]
        args = (candidates, wide, draft, t_temp, d_temp)
        before = ours.state.clone()
        got = block_verify_triton.launch(*args, ours, live, coins, tile=16)
        if step:
            alone = NoiseState(gamma, "cpu")
            alone.state.copy_(before)
            # All phases and barriers in one launch; the interpreter cannot make one program wait for another.
            one = block_verify_triton.launch(*args, alone, live, coins, tile=16, programs=1)
            assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(got, one, strict=True))
            assert torch.equal(ours.state, alone.state)
            assert (ours.arrivals.item(), alone.arrivals.item()) == (0, (2 + (gamma > 1)) << 32)
        want = block_verify_torch(**dict(zip(_NAMES, args, strict=True)), noise=twin, live=live, coins=coins)
        assert got[0].tolist() == want.correct_len.tolist()
        assert got[1].tolist() == want.bonus.tolist()
        torch.testing.assert_close(got[2], want.weights, rtol=2e-6, atol=1e-7)
        computed = got[3] > 0
        torch.testing.assert_close(got[3][computed], want.thresholds[computed], rtol=1e-5, atol=1e-6)
        assert [t.dtype for t in got] == [t.dtype for t in want]
        assert torch.equal(ours.state, twin.state)
    return 2 * bs


def live_case(gamma: int) -> int:
    gen = torch.Generator().manual_seed(0)
    confidence = torch.rand(40, gamma + 2, generator=gen)[:, :gamma]
    confidence[::7] = NAN
    thresholds = torch.rand(gamma - 1, generator=gen)
    if gamma > 1:
        confidence[3, 1] = thresholds[0]
    out = [torch.zeros(40, dtype=torch.int32) for _ in range(2)]
    got = verify_cap_triton.launch_live_rows(confidence, thresholds, out[0])
    assert torch.equal(got, live_rows_torch(confidence, thresholds, out[1]))
    return 40


def routing(rows: int, k: int, seed: int, wide: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random weights (rows of a wider buffer), expert ids and packed ids."""
    gen = torch.Generator().manual_seed(seed)
    weights = torch.rand(rows, k + wide, generator=gen)[:, :k]
    ids = torch.randint(-1, 384, (rows, k), generator=gen, dtype=torch.int32)
    return weights, ids, torch.randint(0, 1 << 30, (rows, k), generator=gen, dtype=torch.int32)


def copy_case(packed: bool, in_use: int | None) -> int:
    live = torch.tensor([1, 4, 6, 2], dtype=torch.int32)
    rows = None if in_use is None else torch.tensor(in_use, dtype=torch.int32)
    sides = []
    for copy in (verify_cap_triton.launch_copy_rows, copy_rows_torch):
        weights, ids, third = routing(24, 6, 1, 2)
        copy(weights, ids, third if packed else None, live, 6, rows)
        sides.append((weights.clone(), ids, third))
    assert all(torch.equal(a, b) for a, b in zip(*sides, strict=True))
    return 24
