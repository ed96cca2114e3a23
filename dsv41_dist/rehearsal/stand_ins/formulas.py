"""The arithmetic of the stand-ins: plain torch on CPU tensors. Knows the engine's layouts, imports nothing of it."""

from __future__ import annotations

import torch

from ..formats import decode_block_fp8, decode_row_fp8, encode_row_fp8

__all__ = ["block_fp8_linear", "expert_mlp", "key_norm_rope", "pack_pages", "rotate_", "silu_mul_clamp"]

_NOPE, _ROPE, _TILE = 448, 64, 64
_ROW = _NOPE + 2 * _ROPE  # bytes of a row's codes and its bf16 tail
_SCALES = 8  # bytes of a row's scales: seven and one of padding


def block_fp8_linear(
    x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, group: int = 32, weight: torch.Tensor | None = None
) -> torch.Tensor:
    """x [..., k] times the transposed block-fp8 weight [n, k], in x's dtype.

    x is rounded to e4m3 with one power-of-two scale per `group` values, as the engine's kernels do for ue8m0
    checkpoints; products and sums are fp32. `weight` is the decoded weight, fp32 [n, k], if the caller keeps it.
    """
    if group != 32:
        raise ValueError(f"activation group {group}: allowed is 32")
    rows = decode_row_fp8(*encode_row_fp8(x.reshape(-1, x.shape[-1])))
    if weight is None:
        weight = decode_block_fp8(codes, scale)
    return (rows @ weight.t()).to(x.dtype).reshape(*x.shape[:-1], codes.shape[0])


def expert_mlp(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    limit: float | None,
) -> torch.Tensor:
    """Routed experts: sum over a row's experts of weight * w2(silu(gate) * up).

    x [m, h]; w13 fp32 [e, 2 * i, h] with the gate's rows first; w2 fp32 [e, h, i]; weights [m, k] and ids [m, k], where
    an id below zero is none. A row's sum is taken in the order of its k slots. Returns x's dtype.
    """
    out = torch.zeros(x.shape[0], ids.shape[1], w2.shape[1])
    for expert in torch.unique(ids[ids >= 0]).tolist():
        rows, slots = (ids == expert).nonzero(as_tuple=True)
        hidden = silu_mul_clamp(x[rows].float() @ w13[expert].t(), limit)
        out[rows, slots] = (hidden @ w2[expert].t()) * weights[rows, slots, None].float()
    return out.sum(1).to(x.dtype)


def silu_mul_clamp(x: torch.Tensor, limit: float | None) -> torch.Tensor:
    """[m, 2 * n] -> [m, n] fp32: silu(min(gate, limit)) * clip(up, -limit, limit), gate in the first half."""
    gate, up = x.float().chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return torch.nn.functional.silu(gate) * up


def rotate_(x: torch.Tensor, table: torch.Tensor, positions: torch.Tensor, inverse: bool) -> None:
    """Rotate x [n, heads, 64] in place by position; `table` is real [positions, 64] of (cos, sin) pairs."""
    turn = torch.view_as_complex(table.float().unflatten(-1, (-1, 2)).contiguous())[positions.long()].unsqueeze(-2)
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
    x.copy_(torch.view_as_real(pairs * (turn.conj() if inverse else turn)).flatten(-2).to(x.dtype))


def key_norm_rope(
    kv: torch.Tensor, weight: torch.Tensor, table: torch.Tensor, positions: torch.Tensor, eps: float
) -> torch.Tensor:
    """kv [n, 512] -> fp32 [n, 512]: RMS norm with `weight`, then the last 64 columns rotated."""
    x = kv.float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()
    tail = x[:, None, _NOPE:].clone()
    rotate_(tail, table, positions, False)
    return torch.cat([x[:, :_NOPE], tail.squeeze(1)], dim=1)


def pack_pages(x: torch.Tensor, slots: torch.Tensor, cache: torch.Tensor, page_size: int) -> None:
    """Write rows x [n, 512] at `slots` (below zero: none) of `cache`, uint8 [pages, bytes], in FlashMLA's V4 layout.

    A page holds its rows' codes first, 448 e4m3 bytes and 64 bf16 values each, then 8 scale bytes a row: seven ue8m0
    exponents, one per 64 codes, and one of padding. Writes in place.
    """
    slots = slots.long()
    x, slots = x[slots >= 0].float(), slots[slots >= 0]
    page, offset = slots // page_size, slots % page_size
    tiles = x[:, :_NOPE].unflatten(-1, (-1, _TILE))
    amax = tiles.abs().amax(-1).clamp(min=1e-4)
    exponent = torch.ceil(torch.log2(amax / 448.0))
    codes = (tiles * torch.exp2(-exponent).unsqueeze(-1)).clamp(-448, 448).to(torch.float8_e4m3fn)
    tail = x[:, _NOPE:].to(torch.bfloat16).contiguous().view(torch.uint8)
    row = torch.cat([codes.flatten(1).view(torch.uint8), tail], 1)
    cache[page.unsqueeze(1), offset.unsqueeze(1) * _ROW + torch.arange(_ROW)] = row
    at = page_size * _ROW + offset.unsqueeze(1) * _SCALES + torch.arange(exponent.shape[1])
    cache[page.unsqueeze(1), at] = (exponent + 127).to(torch.uint8)
