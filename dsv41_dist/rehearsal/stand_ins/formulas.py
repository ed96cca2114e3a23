"""The arithmetic of the stand-ins: plain torch. Knows the engine's layouts, imports nothing of it."""

from __future__ import annotations

import torch

from ..formats import decode_block_fp8, decode_mxfp4, decode_row_fp8, encode_row_fp8, pack_e2m1

__all__ = [
    "block_fp8_linear",
    "expert_mlp",
    "index_key_codes",
    "index_logits",
    "key_norm_rope",
    "mix_streams",
    "order_free_product",
    "pack_index_keys",
    "pack_pages",
    "rotate_",
    "silu_mul_clamp",
    "split_sinkhorn",
]

_NOPE, _ROPE, _TILE = 448, 64, 64
_ROW = _NOPE + 2 * _ROPE  # bytes of a row's codes and its bf16 tail
_GRID = 16.0
_SCALES = 8  # bytes of a row's scales: seven and one of padding


def block_fp8_linear(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    group: int = 32,
    weight: torch.Tensor | None = None,
    order_free: bool = False,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [..., k] times the transposed block-fp8 weight [n, k], in x's dtype.

    x is rounded to e4m3 with one power-of-two scale per `group` values, as the engine's kernels do for ue8m0
    checkpoints, unless `scales` [m, k / 32] says that it is e4m3 already (the result is bf16 then); products and sums
    are fp32. `weight` is the decoded weight, fp32 [n, k], if the caller keeps it.
    """
    if group != 32:
        raise ValueError(f"activation group {group}: allowed is 32")
    flat = x.reshape(-1, x.shape[-1])
    rows = decode_row_fp8(*encode_row_fp8(flat)) if scales is None else decode_row_fp8(flat, scales)
    if weight is None:
        weight = decode_block_fp8(codes, scale)
    out = order_free_product(rows, weight) if order_free else rows @ weight.t()
    return out.to(x.dtype if scales is None else torch.bfloat16).reshape(*x.shape[:-1], codes.shape[0])


def order_free_product(x: torch.Tensor, weight: torch.Tensor, share: float | torch.Tensor = 1.0) -> torch.Tensor:
    """x [m, k] times weight [n, k] transposed, times share [m, 1]: the same bits however k is split over ranks.

    The products of 32 columns are summed in fp32 and rounded to multiples of 1/16. Sums of such multiples are exact in
    fp32, and in bf16 below 16 (below 8 after the engine's factor of 1.5), so neither a rank's share of the groups nor
    the order of an all-reduce changes a bit.
    """
    groups = torch.bmm(
        x.unflatten(-1, (-1, 32)).transpose(0, 1), weight.unflatten(-1, (-1, 32)).permute(1, 2, 0)
    )  # [k / 32, m, n]
    return torch.round(groups * (share * _GRID)).sum(0) / _GRID


def expert_mlp(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    limit: float | None,
    order_free: bool = False,
    scale: float = 1.0,
    static: bool = False,
) -> torch.Tensor:
    """Routed experts: sum over a row's experts of weight * w2(silu(gate) * up).

    x [m, h]; w13 fp32 [e, 2 * i, h] with the gate's rows first; w2 fp32 [e, h, i]; weights [m, k] and ids [m, k], where
    an id below zero is none. A row's sum is taken in the order of its k slots, in fp32, then times `scale`. Returns x's
    dtype. `order_free`: see order_free_product. `static`: every expert on every row, so that no shape depends on the
    routing, as inside a CUDA graph.
    """
    out = torch.zeros(x.shape[0], ids.shape[1], w2.shape[1], device=x.device)
    if static:
        for expert in range(w13.shape[0]):
            mine = ids == expert
            share = (weights.float() * mine).sum(1, keepdim=True)
            hidden = silu_mul_clamp(x.float() @ w13[expert].t(), limit)
            rows = order_free_product(hidden, w2[expert], share) if order_free else hidden @ w2[expert].t() * share
            out = torch.where(mine.unsqueeze(-1), rows.unsqueeze(1), out)
        return (out.sum(1) * scale).to(x.dtype)
    for expert in torch.unique(ids[ids >= 0]).tolist():
        rows, slots = (ids == expert).nonzero(as_tuple=True)
        hidden = silu_mul_clamp(x[rows].float() @ w13[expert].t(), limit)
        share = weights[rows, slots, None].float()
        if order_free:
            out[rows, slots] = order_free_product(hidden, w2[expert], share)
        else:
            out[rows, slots] = (hidden @ w2[expert].t()) * share
    return (out.sum(1) * scale).to(x.dtype)


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


def split_sinkhorn(
    mixes: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, hc: int, iterations: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hyper-connection mixes [..., (2 + hc) * hc] -> pre [..., hc], post [..., hc], comb [..., hc, hc], mixes' dtype.

    pre = sigmoid + eps, post = 2 * sigmoid, comb: softmax of rows, then `iterations` Sinkhorn steps
    (manifold-constrained hyper-connections, the V4 report).
    """
    pre, post, comb = mixes.float().split([hc, hc, hc * hc], dim=-1)
    base_pre, base_post, base_comb = base.float().split([hc, hc, hc * hc])
    scale = scale.float()
    pre = torch.sigmoid(pre * scale[0] + base_pre) + eps
    post = 2 * torch.sigmoid(post * scale[1] + base_post)
    comb = (comb * scale[2] + base_comb).unflatten(-1, (hc, hc)).softmax(-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return pre.to(mixes.dtype), post.to(mixes.dtype), comb.to(mixes.dtype)


def mix_streams(x: torch.Tensor, pre: torch.Tensor, hc: int) -> torch.Tensor:
    """x [m, hc * h] and pre [m, hc] -> fp32 [m, h]: sum over the streams of pre * x, in stream order."""
    streams = x.float().unflatten(-1, (hc, -1))
    total = torch.zeros(x.shape[0], streams.shape[-1])
    for stream in range(hc):
        total += pre[:, stream, None].float() * streams[:, stream]
    return total


def index_key_codes(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Index rows [n, 128] -> E2M1 codes int8 [n, 64] and four ue8m0 exponents in an int32 [n], rounded to even."""
    groups = x.float().unflatten(-1, (4, 32))
    exponent = _power((groups.abs().amax(-1) / 6.0).clamp(min=1.0e-4))  # the engine's floor of a scale
    codes = pack_e2m1((groups * torch.exp2(-exponent).unsqueeze(-1)).flatten(-2))
    bits = (exponent + 127).to(torch.int64)
    packed = bits[:, 0] | bits[:, 1] << 8 | bits[:, 2] << 16 | bits[:, 3] << 24
    return codes, torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def pack_index_keys(
    codes: torch.Tensor, scales: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, page: int
) -> None:
    """Write index rows at `slots` of `cache`, uint8 [pages, page * 68]: all codes of a page first, then its scales."""
    where, offset = slots.long() // page, slots.long() % page
    cache[where[:, None], offset[:, None] * 64 + torch.arange(64)] = codes.view(torch.uint8)
    at = page * 64 + offset[:, None] * 4 + torch.arange(4)
    cache[where[:, None], at] = scales.view(torch.uint8).view(-1, 4)


def index_logits(
    q: torch.Tensor, weights: torch.Tensor, slots: torch.Tensor, lens: torch.Tensor, table: torch.Tensor, page: int
) -> torch.Tensor:
    """Scores fp32 [b, n] of index keys in a paged cache: q bf16 [b, heads, 128], weights bf16 [b, heads], slots [b, n].

    `table` is laid out as by pack_index_keys. Rounded to bf16 after the product, after the weight and after the sum
    over heads; -inf from position lens [b] on. Each key is decoded once.
    """
    keys, where = slots.unique(return_inverse=True)
    at, offset = keys // page, keys % page
    codes = table[at[:, None], offset[:, None] * 64 + torch.arange(64)]
    exponents = table[at[:, None], page * 64 + offset[:, None] * 4 + torch.arange(4)]
    decoded = decode_mxfp4(codes, torch.exp2(exponents.float() - 127)).to(torch.bfloat16)
    products = torch.einsum("bhd,nd->bhn", q.float(), decoded.float()).to(torch.bfloat16)
    scores = (products.relu() * weights.unsqueeze(-1)).sum(1).float().gather(1, where)
    return scores.masked_fill(torch.arange(slots.shape[1]) >= lens[:, None], -torch.inf)


def _power(value: torch.Tensor) -> torch.Tensor:
    """Smallest integer e with value <= 2**e, as float."""
    mantissa, exponent = torch.frexp(value)
    return torch.where(mantissa == 0.5, exponent - 1, exponent).float()
