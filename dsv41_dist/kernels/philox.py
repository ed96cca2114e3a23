"""Philox-4x32-10 (Salmon et al., SC 2011) in plain torch: the noise of the Triton kernels, word for word.

A word is a function of (key, step, domain, row, column) and of nothing else, so ranks that share a key draw the same
noise without talking to each other, and a replayed graph draws new noise because the step is read on the device.
"""

from __future__ import annotations

import torch

__all__ = ["block", "exponential", "uniform", "words"]

_MASK = 0xFFFFFFFF
_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
ROUNDS = 10


def words(state: torch.Tensor, rows: int, columns: int, domain: int) -> torch.Tensor:
    """First output word of the counter (column, row, step, domain): int64 [rows, columns], from 0 to 2^32 - 1.

    `state` is int64 [2]: key and step.
    """
    device = state.device
    c0 = torch.arange(columns, device=device).view(1, -1).expand(rows, columns)
    c1 = torch.arange(rows, device=device).view(-1, 1).expand(rows, columns)
    c2 = (state[1] & _MASK).expand(rows, columns)
    c3 = torch.full((rows, columns), domain, dtype=torch.int64, device=device)
    return block((c0, c1, c2, c3), state[0] & _MASK, (state[0] >> 32) & _MASK)[0]


def block(counter: tuple[torch.Tensor, ...], k0: torch.Tensor, k1: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The four output words of a four-word counter and a two-word key; all int64 holding 32 bits."""
    c0, c1, c2, c3 = counter
    for _ in range(ROUNDS):
        high0, low0 = _multiply(c0, _M0)
        high1, low1 = _multiply(c2, _M1)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c0, c1, c2, c3


def uniform(state: torch.Tensor, rows: int, columns: int, domain: int) -> torch.Tensor:
    """float32 [rows, columns] on [0, 1): the top 24 bits of each word."""
    return (words(state, rows, columns, domain) >> 8).float() * 2.0**-24


def exponential(state: torch.Tensor, rows: int, columns: int, domain: int) -> torch.Tensor:
    """float32 [rows, columns], standard exponential, > 0.

    All 32 bits are used, and near 0 by a series: the smallest values decide an exponential race, and -log(1 - u) of a
    24-bit u would give only multiples of 6e-8 there.
    """
    u = (words(state, rows, columns, domain).float() + 0.5) * 2.0**-32
    u = u.clamp(max=1.0 - 2.0**-24)
    series = u * (1.0 + u * (0.5 + u * (1.0 / 3.0 + u * 0.25)))
    return torch.where(u < 2.0**-6, series, -torch.log(1.0 - u))


def _multiply(a: torch.Tensor, b: int) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low 32 bits of a 32 x 32 bit product, in int64 arithmetic that does not overflow."""
    low, high = b & 0xFFFF, b >> 16
    product_low = a * low  # < 2^48
    product_high = a * high
    total = product_low + ((product_high & 0xFFFF) << 16)  # < 2^49
    return ((product_high >> 16) + (total >> 32)) & _MASK, total & _MASK
