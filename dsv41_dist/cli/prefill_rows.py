"""The row-local work of a V4.1 decoder layer, for `bench prefill`: hyper-connection mix, post, combine and norm.

A residual of S streams, R [T, S, H] bf16, travels between sublayers with the weights `pre` [T, S] that it is read with:

    x            = norm(sum_s pre_s R_s)                      combine_norm
    pre', po, co = sinkhorn(rms(R) . (R fn^T))                mix: K = S H against S (S + 2) rows
    R_s          = po_s y + sum_t co_ts R_t                   post; y is what the sublayer gave, summed over ranks

On a GPU these are Triton kernels (prefill_rows_triton.py) whose bits for a row do not depend on how many rows there
are; elsewhere plain torch in tiles of TILE rows, for the same reason. They stand in for the engine's own kernels.
Bytes moved a row, once each: combine_norm 2 H (S + 1), mix 2 H S, post 2 H (2 S + 1): 184,320 at H = 5120, S = 4.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["STREAMS", "TILE", "Mixer", "combine_norm", "make_mixer", "mix", "post", "row_bytes"]

STREAMS = 4
ROWS_OUT = STREAMS * (STREAMS + 2)
PADDED = 32
TILE = 64
ITERATIONS = 20
EPS = 1e-6


class Mixer(NamedTuple):
    """A hyper-connection. fn: fp32 [24, S H]. parts: its three bf16 summands, [3, 32, S H], rows 24 on zero.
    scale: fp32 [3]. base: fp32 [24]."""

    fn: torch.Tensor
    parts: torch.Tensor
    scale: torch.Tensor
    base: torch.Tensor


def make_mixer(hidden: int, seed: int, device: torch.device) -> Mixer:
    """Random weights, the same on every rank that passes the same seed."""
    gen = torch.Generator(device).manual_seed(seed)
    fn = torch.randn(ROWS_OUT, STREAMS * hidden, generator=gen, device=device) * (STREAMS * hidden) ** -0.5
    padded = torch.nn.functional.pad(fn, (0, 0, 0, PADDED - ROWS_OUT))
    first = padded.bfloat16()
    second = (padded - first.float()).bfloat16()
    third = (padded - first.float() - second.float()).bfloat16()
    base = torch.randn(ROWS_OUT, generator=gen, device=device) * 0.1
    return Mixer(fn, torch.stack([first, second, third]).contiguous(), torch.ones(3, device=device), base)


def row_bytes(hidden: int) -> int:
    """Bytes that a sublayer's row-local work reads and writes of one row."""
    return 2 * hidden * ((STREAMS + 1) + STREAMS + (2 * STREAMS + 1))


def mix(residual: torch.Tensor, mixer: Mixer) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """residual [T, S, H] -> (pre [T, S], post [T, S], comb [T, S, S]), fp32. T must be a multiple of TILE."""
    _check(residual)
    if residual.is_cuda:
        from .prefill_rows_triton import launch_mix

        return launch_mix(residual, mixer)
    mixed = torch.cat([_mixed(tile, mixer) for tile in residual.split(TILE)])
    s = STREAMS
    pre = torch.sigmoid(mixed[:, :s] * mixer.scale[0] + mixer.base[:s]) + EPS
    po = 2 * torch.sigmoid(mixed[:, s : 2 * s] * mixer.scale[1] + mixer.base[s : 2 * s])
    co = torch.softmax((mixed[:, 2 * s :] * mixer.scale[2] + mixer.base[2 * s :]).view(-1, s, s), -1) + EPS
    co = co / (_sum(co, -2) + EPS)
    for _ in range(ITERATIONS - 1):
        co = co / (_sum(co, -1) + EPS)
        co = co / (_sum(co, -2) + EPS)
    return pre, po, co


def post(residual: torch.Tensor, y: torch.Tensor, po: torch.Tensor, co: torch.Tensor) -> torch.Tensor:
    """residual [T, S, H] and y [T, H] bf16 -> the residual after the sublayer, [T, S, H] bf16."""
    _check(residual)
    if residual.is_cuda:
        from .prefill_rows_triton import launch_post

        return launch_post(residual, y, po, co)
    out = torch.empty_like(residual)
    wide = [residual[:, t].float() for t in range(STREAMS)]
    for s in range(STREAMS):
        total = po[:, s, None] * y.float()
        for t in range(STREAMS):
            total = total + co[:, t, s, None] * wide[t]
        out[:, s] = total.to(residual.dtype)
    return out


def combine_norm(residual: torch.Tensor, pre: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """residual [T, S, H] bf16, pre [T, S] fp32, weight [H] bf16 -> the sublayer's input [T, H] bf16."""
    _check(residual)
    if residual.is_cuda:
        from .prefill_rows_triton import launch_combine_norm

        return launch_combine_norm(residual, pre, weight)
    out = [_combine_tile(r, p, weight) for r, p in zip(residual.split(TILE), pre.split(TILE), strict=True)]
    return torch.cat(out)


def _mixed(tile: torch.Tensor, mixer: Mixer) -> torch.Tensor:
    flat = tile.reshape(tile.shape[0], -1).float()
    return (flat @ mixer.fn.t()) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + EPS)


def _sum(c: torch.Tensor, dim: int) -> torch.Tensor:
    """Over the S entries of dim, kept: in one order whatever the shape."""
    first, *rest = c.unbind(dim)
    for other in rest:
        first = first + other
    return first.unsqueeze(dim)


def _combine_tile(tile: torch.Tensor, pre: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    total = pre[:, 0, None] * tile[:, 0].float()
    for s in range(1, STREAMS):
        total = total + pre[:, s, None] * tile[:, s].float()
    normed = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + EPS)
    return (normed * weight.float()).to(tile.dtype)


def _check(residual: torch.Tensor) -> None:
    if residual.dim() != 3 or residual.shape[1] != STREAMS or residual.shape[0] % TILE or residual.shape[2] % 16:
        raise ValueError(
            f"residual is {tuple(residual.shape)}: allowed is [rows in multiples of {TILE}, {STREAMS}, hidden in "
            "multiples of 16]"
        )
