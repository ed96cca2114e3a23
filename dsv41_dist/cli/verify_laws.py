"""Speculative decoding over a small vocabulary, in full: every draft path, every coin integrated out, in float64.

A `Pair` is a target and a draft law for every prefix. `outcome` follows a rule over all paths to the law of what is
emitted and the expected number of emitted tokens; `closed_form` is that number from the literature's formulas:

    token-wise  1 + sum_i E_q[ min(1, p/q)(x_1) ... min(1, p/q)(x_i) ]   Leviathan et al., ICML 2023
    block       1 + sum_i E_q[ w_i ]                                     Sun et al., ICLR 2025

each term times 1{L >= i} under a cap L that follows from earlier drafts alone.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import torch

from ..kernels.block_verify import block_laws
from ..kernels.verify_cap import live_rows

__all__ = ["Pair", "Rule", "closed_form", "make_pair", "outcome", "rule_of", "verified_drafts"]


class Pair(NamedTuple):
    """Laws of one synthetic pair with g drafts over V tokens, and their values along all P = V^g draft paths.

    levels: target law of every prefix of length i, [V^i, V], i = 0..g. drafts: the same of the draft, i < g.
    paths: int64 [P, g]. p: [P, g + 1, V]. q: [P, g, V], what drafts are tested with. drawn: [P], probability of each
    path under the law it is drawn from (q's, but for `make_pair(drawn_at=)`).
    """

    levels: list[torch.Tensor]
    drafts: list[torch.Tensor]
    paths: torch.Tensor
    p: torch.Tensor
    q: torch.Tensor
    drawn: torch.Tensor

    @property
    def overlap(self) -> float:
        """Mean over positions of E[sum_y min(p, q)]: the share of drafts that the token rule accepts one by one."""
        index = self.drawn.view(-1, 1)
        return float((torch.minimum(self.p[:, :-1], self.q).sum(-1) * index).sum(0).mean())


class Rule(NamedTuple):
    """What a verification does on each path. h: [P, g + 1] acceptance thresholds from the back (P(tau = i | tau <= i)).
    correction: [P, g + 1, V], the law (not normalised) of the token after i accepted drafts. reach: [P, g + 1], the
    closed form's P(tau >= i). cut: int [P], drafts that a longer run is cut to; None: not cut."""

    h: torch.Tensor
    correction: torch.Tensor
    reach: torch.Tensor
    cut: torch.Tensor | None


def make_pair(
    vocab: int,
    drafts: int,
    agreement: float,
    temperature: float,
    tau: float,
    *,
    scale: float = 3.0,
    seed: int = 0,
    drawn_at: float = 1.0,
) -> Pair:
    """Random logits for every prefix: the target's normal with standard deviation `scale`, the draft's with correlation
    `agreement` (0 to 1) to them. p at `temperature`, q at temperature * tau. `drawn_at` other than 1 is a fault: the
    drafts are drawn at that many times the temperature that they are tested with.
    """
    gen = torch.Generator().manual_seed(seed)
    target = [torch.randn(vocab**i, vocab, generator=gen, dtype=torch.float64) for i in range(drafts + 1)]
    noise = [torch.randn(vocab**i, vocab, generator=gen, dtype=torch.float64) for i in range(drafts)]
    blend = [agreement * t + math.sqrt(1 - agreement**2) * n for t, n in zip(target, noise, strict=False)]
    levels = [torch.softmax(scale * t / temperature, -1) for t in target]
    laws = [torch.softmax(scale * d / (temperature * tau), -1) for d in blend]
    source = [torch.softmax(scale * d / (temperature * tau * drawn_at), -1) for d in blend]
    paths = torch.tensor(list(itertools.product(range(vocab), repeat=drafts)))
    prefix = [torch.arange(len(paths)) // vocab ** (drafts - i) for i in range(drafts + 1)]
    p = torch.stack([levels[i][prefix[i]] for i in range(drafts + 1)], 1)
    q = torch.stack([laws[i][prefix[i]] for i in range(drafts)], 1)
    rows = torch.stack([source[i][prefix[i]] for i in range(drafts)], 1)
    drawn = rows.gather(-1, paths.unsqueeze(-1)).squeeze(-1).prod(-1)
    return Pair(levels, laws, paths, p, q, drawn)


def verified_drafts(pair: Pair, cap: int | list[float]) -> torch.Tensor:
    """int64 [P]: how many drafts of each path are verified (L).

    A number is a fixed cap. Thresholds let L grow as `live_rows` does, with an ideal confidence head: the confidence of
    draft j is sum_y min(p, q) after x_1..x_{j-1}, the chance that the token rule accepts it. It knows no later draft.
    """
    count, drafts = pair.paths.shape
    if isinstance(cap, int):
        return torch.full((count,), min(cap, drafts))
    confidence = torch.minimum(pair.p[:, :-1], pair.q).sum(-1)
    thresholds = torch.tensor(cap[: drafts - 1], dtype=torch.float32)
    return live_rows(confidence, thresholds, torch.empty(count, dtype=torch.int32)).long() - 1


def rule_of(pair: Pair, block: bool, lengths: torch.Tensor | None = None) -> Rule:
    """Token-wise or block verification of the pair, under a cap where `lengths` [P] are given.

    Under a cap the target's rows past it are garbage (here uniform), as dead rows are. The block ends at the cap, as
    block_verify does it; the token rule runs on and is cut there, as the engine does it.
    """
    rows = torch.arange(pair.p.shape[1])
    p = pair.p
    if lengths is not None:
        dead = (rows[None, :] > lengths[:, None]).unsqueeze(-1)
        p = torch.where(dead, torch.full_like(p, 1.0 / p.shape[-1]), p)
    if block:
        w, h, correction = block_laws(p, pair.q, pair.paths, None if lengths is None else (lengths + 1).int())
        return Rule(h, correction, w, None)
    index = pair.paths.unsqueeze(-1)
    accept = (p[:, :-1].gather(-1, index) / pair.q.gather(-1, index)).squeeze(-1).clamp(max=1)
    reach = torch.cat([torch.ones_like(accept[:, :1]), accept.cumprod(-1)], 1)
    stop = reach - torch.cat([reach[:, 1:], torch.zeros_like(reach[:, :1])], 1)  # P(tau = i)
    up_to = stop.cumsum(-1)
    h = torch.where(up_to > 0, stop / up_to, torch.zeros_like(stop))
    correction = torch.cat([(p[:, :-1] - pair.q).clamp(min=0), p[:, -1:]], 1)
    empty = correction.sum(-1, keepdim=True) == 0
    correction = torch.where(empty, p, correction)
    if lengths is not None:
        reach = torch.where(rows[None, :] > lengths[:, None], torch.zeros_like(reach), reach)
    return Rule(h, correction, reach, lengths)


def closed_form(pair: Pair, rule: Rule) -> float:
    """Expected emitted tokens a step by the formulas above."""
    return 1.0 + float((pair.drawn[:, None] * rule.reach[:, 1:]).sum())


def outcome(pair: Pair, rule: Rule) -> tuple[float, float]:
    """(largest difference between the law of the first g + 1 tokens and the target's, expected emitted tokens).

    After what a step emits, the text goes on by the target's law.
    """
    count, drafts = pair.paths.shape
    vocab = pair.p.shape[-1]
    limit = torch.full((count,), drafts) if rule.cut is None else rule.cut
    emitted = [torch.zeros(vocab ** (i + 1), dtype=torch.float64) for i in range(drafts + 1)]  # by sequence
    expected = 0.0
    left = pair.drawn
    for i in range(drafts, -1, -1):
        here = left * rule.h[:, i] if i else left
        left = left - here
        # The run is i drafts and a token. Past the cap it is cut to the first L + 1 of its tokens, all drafts.
        for length in range(i + 1):
            whole = length == i
            chosen = limit >= i if whole else limit == length
            if not bool(chosen.any()):
                continue
            mass = here[chosen]
            expected += float(mass.sum()) * (length + 1)
            at = pair.paths[chosen, :length]
            prefix = (at * vocab ** torch.arange(length - 1, -1, -1)).sum(-1) * vocab
            if whole:
                law = rule.correction[chosen, i]
                law = law / law.sum(-1, keepdim=True) * mass[:, None]
                emitted[i].view(-1, vocab).index_add_(0, prefix // vocab, law)
            else:
                emitted[length].index_add_(0, prefix + pair.paths[chosen, length], mass)
    law, wanted = emitted[0], pair.levels[0].reshape(-1)
    for i in range(1, drafts + 1):
        law = (law[:, None] * pair.levels[i]).reshape(-1) + emitted[i]
        wanted = (wanted[:, None] * pair.levels[i]).reshape(-1)
    return float((law - wanted).abs().max()), expected
