"""Block verification of drafted tokens (Sun et al., Block Verification Accelerates Speculative Decoding, ICLR 2025).

Drafts x_1..x_g come from q; p_i and q_i are the laws of the token after x_1..x_i. With w_0 = 1:

    w_i = min(w_{i-1} p_{i-1}(x_i) / q_{i-1}(x_i), 1)     0 where q_{i-1}(x_i) is not in (0, 1]
    S_i = sum_y max(w_i p_i(y) - q_i(y), 0)               i < g
    h_i = S_i / (S_i + 1 - w_i)   (i < g; 1 where w_i = 1)      h_g = w_g
    tau = max { i : eta_i < h_i }, eta iid uniform on [0, 1); 0 if there is none
    emit x_1..x_tau, then Y ~ max(w_tau p_tau - q_tau, 0) / S_tau, or Y ~ p_g when tau = g

The emitted tokens follow p exactly, whatever q; P(tau >= i | x_1..x_i) = w_i. With `live`, request b ends its block at
g = live[b] - 1: exact as long as [live > j] follows from x_1..x_{j-1} alone.

`block_laws` is the definition in plain torch and the tests' subject for exact enumeration. `block_verify` decides by
counter-based noise, the same on every rank that holds the same key and counter: on a GPU by a Triton kernel that reads
logits (bytes moved per request: passes over 2 g + 1, up to 2 g - 2 and 2 rows of V logits, so at most 21 V x 4
bytes at g = 5, 10.9 MB at V = 129280: 2.3 us at 4.8 TB/s), elsewhere by the twin `block_verify_torch`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .philox import exponential, uniform

__all__ = ["BlockVerdict", "NoiseState", "block_laws", "block_verify", "block_verify_torch", "coins_of"]

_COINS, _TOKENS = 0, 1  # the noise's domains


class NoiseState:
    """Key and step counter of the noise, on the device: int64 [2]. Each `block_verify` call takes one step.

    Ranks that start with the same key and make the same calls draw the same noise. Calls with one state must follow
    each other, as on one stream: two at once would take the same step, and their programs would count themselves into
    the same barrier (`arrivals`, int64 [1]).
    """

    def __init__(self, key: int, device: torch.device | str) -> None:
        self.key = int(key) & 0x7FFFFFFFFFFFFFFF
        self.state = torch.tensor([self.key, 0], dtype=torch.int64, device=device)
        self.arrivals = torch.zeros(1, dtype=torch.int64, device=device)


class BlockVerdict(NamedTuple):
    """What was decided. `weights` and `thresholds` are float [bs, g + 1]: w_i and h_i; index 0 is 1.

    Both are 0 past the live rows. A threshold whose coin is not below w_i may be 0 too: h_i <= w_i, so nothing follows
    from it and it need not be computed.
    """

    correct_len: torch.Tensor  # int32 [bs]: tau, the accepted drafts
    bonus: torch.Tensor  # int64 [bs]: Y
    weights: torch.Tensor
    thresholds: torch.Tensor


def block_laws(
    target_probs: torch.Tensor, draft_probs: torch.Tensor, drafts: torch.Tensor, live: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(w [bs, g + 1], h [bs, g + 1], correction [bs, g + 1, V]) in the dtype of the probabilities.

    `correction[b, i]` is the law of Y, not normalised, when tau = i. Where rounding leaves it empty it is p_i, never a
    token outside the target's support.

    Args:
        target_probs: float [bs, g + 1, V].
        draft_probs: float [bs, g, V]; an entry that is no probability counts as 0.
        drafts: int [bs, g].
        live: int [bs], live rows of each request, from 1 to g + 1; None is g + 1 for all.
    """
    bs, gamma = drafts.shape
    index = drafts.long().unsqueeze(-1)
    p_x = target_probs[:, :gamma].gather(-1, index).squeeze(-1)
    q_x = draft_probs.gather(-1, index).squeeze(-1)
    usable = (q_x > 0) & (q_x <= 1) & (p_x >= 0)
    weights = [torch.ones_like(p_x[:, 0])]
    for i in range(gamma):
        ratio = weights[-1] * p_x[:, i] / q_x[:, i]
        weights.append(torch.where(usable[:, i], ratio.clamp(max=1), torch.zeros_like(ratio)))
    w = torch.stack(weights, dim=1)

    q = torch.where((draft_probs >= 0) & (draft_probs <= 1), draft_probs, torch.zeros_like(draft_probs))
    excess = w[:, :gamma, None] * target_probs[:, :gamma] - q
    correction = torch.where(excess > 0, excess, torch.zeros_like(excess))
    total = correction.sum(-1)
    h = torch.where(w[:, :gamma] >= 1, torch.ones_like(total), total / (total + (1 - w[:, :gamma])))
    h = torch.cat([h, w[:, gamma:]], dim=1)
    correction = torch.cat([correction, target_probs[:, gamma:]], dim=1)
    if live is not None:
        last = (live.long() - 1).view(bs, 1)
        rows = torch.arange(gamma + 1, device=drafts.device).view(1, -1)
        h = torch.where(rows == last, w, torch.where(rows > last, torch.zeros_like(h), h))
        w = torch.where(rows > last, torch.zeros_like(w), w)
        correction = torch.where((rows == last).unsqueeze(-1), target_probs, correction)
    empty = ~(correction > 0).any(-1, keepdim=True)
    return w, h, torch.where(empty, target_probs, correction)


def block_verify(
    *,
    candidates: torch.Tensor,
    target: torch.Tensor,
    draft_logits: torch.Tensor | None,
    target_temperatures: torch.Tensor | None,
    draft_temperatures: torch.Tensor,
    noise: NoiseState,
    live: torch.Tensor | None = None,
    coins: torch.Tensor | None = None,
) -> BlockVerdict:
    """Verify one block per request. Graph-safe: no host read, fresh outputs, and the noise's counter is advanced on
    the device.

    Args:
        candidates: int [bs, g + 1], the anchor and the g drafts; bs >= 1, g >= 1.
        target: [bs * (g + 1), V] or [bs, g + 1, V], last dimension dense: logits when `target_temperatures` is given,
            else probabilities. -inf is a token of probability 0.
        draft_logits: [bs, g, V], last dimension dense; None: the drafts were an argmax (q is one-hot).
        target_temperatures, draft_temperatures: float, bs elements, > 0.
        live: int32, bs elements, see `block_laws`.
        coins: float [bs, g], eta_1..eta_g to use instead of the noise's (the correction token still draws from it).

    Raises:
        ValueError: shapes or devices that do not fit together.
    """
    target = _checked(candidates, target, draft_logits, target_temperatures, draft_temperatures, noise, live, coins)
    candidates = candidates.contiguous()
    if target.is_cuda:
        from .block_verify_triton import launch

        out = launch(candidates, target, draft_logits, target_temperatures, draft_temperatures, noise, live, coins)
        return BlockVerdict(*out)
    return block_verify_torch(
        candidates=candidates,
        target=target,
        draft_logits=draft_logits,
        target_temperatures=target_temperatures,
        draft_temperatures=draft_temperatures,
        noise=noise,
        live=live,
        coins=coins,
    )


def block_verify_torch(
    *,
    candidates: torch.Tensor,
    target: torch.Tensor,
    draft_logits: torch.Tensor | None,
    target_temperatures: torch.Tensor | None,
    draft_temperatures: torch.Tensor,
    noise: NoiseState,
    live: torch.Tensor | None = None,
    coins: torch.Tensor | None = None,
) -> BlockVerdict:
    """`block_verify` in plain torch, float32: the twin."""
    bs, rows = candidates.shape
    drafts = candidates[:, 1:].long()
    target = target.reshape(bs, rows, -1)
    vocab = target.shape[-1]
    if target_temperatures is None:
        p = target.float()
    else:
        p = _softmax(target, target_temperatures)
    if draft_logits is None:
        q = torch.zeros(bs, rows - 1, vocab, device=p.device).scatter_(-1, drafts.unsqueeze(-1), 1.0)
    else:
        q = _softmax(draft_logits, draft_temperatures)
    w, h, correction = block_laws(p, q, drafts, live)
    if coins is None:
        coins = coins_of(noise, bs, rows - 1)
    index = torch.arange(1, rows, device=p.device)
    tau = torch.where(coins < h[:, 1:], index, torch.zeros_like(index)).amax(dim=1)
    law = correction.gather(1, tau.view(bs, 1, 1).expand(bs, 1, vocab)).squeeze(1)
    clock = exponential(noise.state, bs, vocab, _TOKENS)
    score = torch.where(law > 0, law.log() - clock.log(), torch.full_like(law, -torch.inf))
    noise.state[1] += 1
    return BlockVerdict(tau.to(torch.int32), score.argmax(-1), w, h)


def coins_of(noise: NoiseState, bs: int, gamma: int) -> torch.Tensor:
    """eta of the step that the noise is at: float32 [bs, gamma]."""
    return uniform(noise.state, bs, gamma, _COINS)


def _softmax(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    # The difference is divided, not the logit: at a temperature of 1e-5 the quotient of a logit keeps no digits.
    logits = logits.float()
    top = logits.amax(-1, keepdim=True)
    return torch.softmax((logits - top) / temperatures.float().view(-1, 1, 1), dim=-1)


def _checked(
    candidates: torch.Tensor,
    target: torch.Tensor,
    draft_logits: torch.Tensor | None,
    target_temperatures: torch.Tensor | None,
    draft_temperatures: torch.Tensor,
    noise: NoiseState,
    live: torch.Tensor | None,
    coins: torch.Tensor | None,
) -> torch.Tensor:
    """`target` as [bs * (g + 1), V], once everything fits together."""
    bs, rows = candidates.shape
    if bs < 1:
        raise ValueError("candidates has 0 requests: allowed is 1 or more")
    if rows < 2:
        raise ValueError(f"candidates has {rows} rows per request: allowed is 2 or more (an anchor and a draft)")
    for name, value in (
        ("candidates", candidates),
        ("draft_logits", draft_logits),
        ("target_temperatures", target_temperatures),
        ("draft_temperatures", draft_temperatures),
        ("noise", noise.state),
        ("live", live),
        ("coins", coins),
    ):
        if value is not None and value.device != target.device:
            raise ValueError(f"{name} is on {value.device}: allowed is {target.device}, where target is")
    if target.dim() == 3 and tuple(target.shape[:2]) == (bs, rows):
        target = target.reshape(bs * rows, -1)
    if target.dim() != 2 or target.shape[0] != bs * rows or target.stride(-1) != 1:
        raise ValueError(
            f"target is {tuple(target.shape)} with strides {target.stride()}: allowed is [{bs * rows}, V], last dense"
        )
    if draft_logits is not None and (
        tuple(draft_logits.shape) != (bs, rows - 1, target.shape[1]) or draft_logits.stride(-1) != 1
    ):
        raise ValueError(
            f"draft_logits is {tuple(draft_logits.shape)} with strides {draft_logits.stride()}: "
            f"allowed is [{bs}, {rows - 1}, {target.shape[1]}], last dense"
        )
    for name, value in (("target_temperatures", target_temperatures), ("draft_temperatures", draft_temperatures)):
        if value is not None and value.numel() != bs:
            raise ValueError(f"{name} has {value.numel()} elements: allowed is {bs}, one for each request")
    if live is not None and (live.numel() != bs or live.dtype != torch.int32):
        raise ValueError(f"live is {live.dtype} with {live.numel()} elements: allowed is int32 with {bs}")
    if coins is not None and tuple(coins.shape) != (bs, rows - 1):
        raise ValueError(f"coins is {tuple(coins.shape)}: allowed is [{bs}, {rows - 1}]")
    return target
