"""Exact laws of speculative decoding over small vocabularies: every draft path, every coin integrated out.

`Rule`s are written here once more, from the paper and in rational numbers: the oracle for the product's `block_laws`.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from fractions import Fraction

import torch

Path = tuple[int, ...]
Cap = Callable[[Path], int]
Outcome = dict[tuple[int, int], Fraction]  # (accepted drafts, next token) -> probability


class Model:
    """A law for each prefix, in sixths of random small integers; `zeros` allows tokens of probability 0."""

    def __init__(self, vocab: int, rng: random.Random, zeros: bool) -> None:
        self.vocab, self.rng, self.low = vocab, rng, 0 if zeros else 1
        self.laws: dict[Path, list[Fraction]] = {}

    def __call__(self, prefix: Path) -> list[Fraction]:
        if prefix not in self.laws:
            weights = [self.rng.randint(self.low, 6) for _ in range(self.vocab)]
            weights[0] += not any(weights)
            self.laws[prefix] = [Fraction(weight, sum(weights)) for weight in weights]
        return self.laws[prefix]


class Confidence:
    """A fixed random number for each prefix: what a confidence head might say."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.said = rng, {}

    def cap(self, drafts: int, ahead: int) -> Cap:
        """The stopping rule of verify_cap, where draft j is judged by x_1..x_{j-1+ahead}; 0 is the causal rule."""

        def length(x: Path) -> int:
            for j in range(2, drafts + 1):
                prefix = x[: min(j - 1 + ahead, drafts)]
                if self.said.setdefault(prefix, self.rng.random()) < 0.5:
                    return j - 1
            return drafts

        return length


def block_rule(p: list[list[Fraction]], q: list[list[Fraction]], x: Path) -> tuple[list[Fraction], list[Fraction]]:
    """(w_0..w_g, h_0..h_g) of Algorithm 2, g = len(x)."""
    w = [Fraction(1)]
    for i, token in enumerate(x):
        w.append(min(w[-1] * p[i][token] / q[i][token], Fraction(1)) if q[i][token] else Fraction(0))
    h = []
    for i in range(len(x)):
        total = sum(max(w[i] * a - b, 0) for a, b in zip(p[i], q[i], strict=True))
        h.append(Fraction(1) if w[i] == 1 else total / (total + 1 - w[i]))
    return w, [*h, w[-1]]


def block_outcome(p, q, x: Path) -> Outcome:
    """Block verification of the drafts x; p has one row more than x."""
    w, h = block_rule(p, q, x)
    out: Outcome = {}
    left = Fraction(1)
    for i in range(len(x), -1, -1):
        here = left * (h[i] if i else 1)
        left -= here
        if i == len(x):
            law = p[i]
        else:
            law = [max(w[i] * a - b, 0) for a, b in zip(p[i], q[i], strict=True)]
        _spread(out, i, here, law)
    return out


def token_outcome(p, q, x: Path) -> Outcome:
    """Token-wise rejection sampling (Leviathan et al., 2023) of the drafts x."""
    out: Outcome = {}
    left = Fraction(1)
    for i, token in enumerate(x):
        accept = min(p[i][token] / q[i][token], Fraction(1)) if q[i][token] else Fraction(0)
        _spread(out, i, left * (1 - accept), [max(a - b, 0) for a, b in zip(p[i], q[i], strict=True)])
        left *= accept
    _spread(out, len(x), left, p[len(x)])
    return out


def _spread(out: Outcome, i: int, mass: Fraction, law: list[Fraction]) -> None:
    if mass:
        total = sum(law)
        assert total > 0, "stopped where there is nothing to draw from"
        for token, weight in enumerate(law):
            if weight:
                out[i, token] = out.get((i, token), Fraction(0)) + mass * weight / total


def run(p: Model, q: Model, drafts: int, rule, cap: Cap | None = None, truncate: bool = False):
    """(whether the first `drafts` + 1 tokens follow p exactly, expected emitted tokens).

    Without `truncate` the rule runs on the first cap(x) drafts. With it the rule runs on all, the target rows past the
    cap being uniform garbage, and the result is cut to cap(x) drafts and one token.
    """
    vocab = p.vocab
    cap = cap or (lambda x: drafts)
    emitted: dict[Path, Fraction] = {}
    expected = Fraction(0)
    for x in itertools.product(range(vocab), repeat=drafts):
        mass = path_mass(q, x)
        if not mass:
            continue
        last = cap(x)
        depth = drafts if truncate else last
        rows = [p(x[:i]) if i <= last else [Fraction(1, vocab)] * vocab for i in range(depth + 1)]
        for (i, token), probability in rule(rows, [q(x[:i]) for i in range(depth)], x[:depth]).items():
            sequence = (*x[:i], token)[: last + 1]
            expected += mass * probability * len(sequence)
            emitted[sequence] = emitted.get(sequence, Fraction(0)) + mass * probability
    law = dict.fromkeys(itertools.product(range(vocab), repeat=drafts + 1), Fraction(0))
    for sequence, mass in emitted.items():
        for tail in itertools.product(range(vocab), repeat=drafts + 1 - len(sequence)):
            law[sequence + tail] += mass * path_mass(p, sequence + tail, start=len(sequence))
    return all(path_mass(p, sequence) == mass for sequence, mass in law.items()), expected


def path_mass(model: Model, x: Path, start: int = 0) -> Fraction:
    mass = Fraction(1)
    for i in range(start, len(x)):
        mass *= model(x[:i])[x[i]]
    return mass


def expected_by_formula(p: Model, q: Model, drafts: int, cap: Cap | None = None) -> Fraction:
    """1 + sum_i E_q[w_i 1{cap >= i}]."""
    total = Fraction(1)
    for x in itertools.product(range(p.vocab), repeat=drafts):
        rows = [p(x[:i]) for i in range(drafts + 1)]
        w, _ = block_rule(rows, [q(x[:i]) for i in range(drafts)], x)
        total += path_mass(q, x) * sum(w[1 : (cap(x) if cap else drafts) + 1])
    return total


# The same for the product's own functions, in float64.


class Tables:
    """Target and draft laws for every prefix of up to `drafts` tokens, as float64 tensors over all draft paths."""

    def __init__(self, target, draft, vocab: int, drafts: int) -> None:
        """`target` and `draft` give a float64 [vocab] law for a prefix."""
        self.vocab, self.drafts = vocab, drafts
        self.paths = torch.tensor(list(itertools.product(range(vocab), repeat=drafts)))
        prefixes = [list(itertools.product(range(vocab), repeat=i)) for i in range(drafts + 1)]
        self.p = [torch.stack([target(prefix) for prefix in level]) for level in prefixes]
        self.q = [torch.stack([draft(prefix) for prefix in level]) for level in prefixes[:-1]]
        at = [torch.arange(len(self.paths)) // vocab ** (drafts - i) for i in range(drafts + 1)]
        self.target_rows = torch.stack([self.p[i][at[i]] for i in range(drafts + 1)], dim=1)
        self.draft_rows = torch.stack([self.q[i][at[i]] for i in range(drafts)], dim=1)

    def drawn(self, draft_rows: torch.Tensor | None = None) -> torch.Tensor:
        """Probability of each draft path under the law it is drawn from."""
        rows = self.draft_rows if draft_rows is None else draft_rows
        return rows.gather(-1, self.paths.unsqueeze(-1)).squeeze(-1).prod(-1)

    def error(self, drawn: torch.Tensor, h, correction, cap: torch.Tensor | None = None) -> tuple[float, float]:
        """(largest difference of the emitted law from the target's, expected tokens) of drafts drawn with `drawn`,
        accepted with thresholds h and corrected by `correction`. `cap` cuts each path to that many drafts."""
        drafts, vocab = self.drafts, self.vocab
        mass = [torch.zeros(vocab**i, vocab, dtype=torch.float64) for i in range(drafts + 1)]
        left = drawn.clone()
        expected = 0.0
        rows = torch.arange(len(self.paths))
        for i in range(drafts, -1, -1):
            here = left * (h[:, i] if i else 1.0)
            left = left - here
            law = correction[:, i] / correction[:, i].sum(-1, keepdim=True) * here[:, None]
            cut = torch.zeros_like(rows, dtype=torch.bool) if cap is None else cap < i
            mass[i].index_add_(0, rows[~cut] // vocab ** (drafts - i), law[~cut])
            expected += float(here[~cut].sum()) * (i + 1)
            if cap is not None:
                # A longer run is cut: the token after the capped drafts is the next draft itself.
                for length in range(i):
                    chosen = cut & (cap == length)
                    at = rows[chosen] // vocab ** (drafts - length)
                    mass[length].index_put_((at, self.paths[chosen, length]), here[chosen], accumulate=True)
                    expected += float(here[chosen].sum()) * (length + 1)
        emitted, wanted = mass[0].reshape(-1), self.p[0].reshape(-1)
        for i in range(1, drafts + 1):
            wanted = (wanted[:, None] * self.p[i]).reshape(-1)
            emitted = (emitted[:, None] * self.p[i] + mass[i]).reshape(-1)
        return float((emitted - wanted).abs().max()), expected
