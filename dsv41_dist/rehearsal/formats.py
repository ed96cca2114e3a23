"""Tensor formats of a published V4.1 checkpoint: block-fp8 with ue8m0 scales, and MXFP4. Encoders and their decoders.

Sources: OCP Microscaling Formats (MX) v1.0 for E2M1 and E8M0; DeepSeek-V3 report section 3.3 for block-wise fp8 (there
128 x 128 with fp32 scales; V4.1 has 32 x 32 with power-of-two scales).
"""

from __future__ import annotations

import torch

__all__ = [
    "BLOCK",
    "decode_block_fp8",
    "decode_mxfp4",
    "decode_row_fp8",
    "encode_block_fp8",
    "encode_mxfp4",
    "encode_row_fp8",
    "pack_e2m1",
]

BLOCK = 32
_E4M3_MAX = 448.0
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def encode_block_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[n, k] float (n, k multiples of 32) -> float8_e4m3fn [n, k], float8_e8m0fnu [n/32, k/32]: value = code * scale.

    The scale is the smallest power of two that keeps a block inside e4m3's range. Raises ValueError for other shapes.
    """
    n, k = weight.shape
    if n % BLOCK or k % BLOCK:
        raise ValueError(f"weight {tuple(weight.shape)}: both sizes must be multiples of {BLOCK}")
    blocks = weight.float().reshape(n // BLOCK, BLOCK, k // BLOCK, BLOCK)
    exponent = _exponent(blocks.abs().amax(dim=(1, 3)), _E4M3_MAX)
    codes = blocks * torch.exp2(-exponent)[:, None, :, None]
    return codes.reshape(n, k).to(torch.float8_e4m3fn), torch.exp2(exponent).to(torch.float8_e8m0fnu)


def decode_block_fp8(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Inverse of encode_block_fp8, fp32. The block size is taken from the shapes; an edge block may be partial."""
    n, k = codes.shape
    rows = scale.float().repeat_interleave(-(-n // scale.shape[0]), 0)[:n]
    return codes.float() * rows.repeat_interleave(-(-k // scale.shape[1]), 1)[:, :k]


def encode_row_fp8(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., k] float -> float8_e4m3fn [..., k], float8_e8m0fnu [..., k/32]: one scale per 32 values of a row."""
    groups = rows.float().unflatten(-1, (-1, BLOCK))
    exponent = _exponent(groups.abs().amax(-1), _E4M3_MAX)
    codes = (groups * torch.exp2(-exponent).unsqueeze(-1)).flatten(-2)
    return codes.to(torch.float8_e4m3fn), torch.exp2(exponent).to(torch.float8_e8m0fnu)


def decode_row_fp8(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Inverse of encode_row_fp8, fp32."""
    return (codes.float().unflatten(-1, (-1, BLOCK)) * scale.float().unsqueeze(-1)).flatten(-2)


def encode_mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[n, k] float (k a multiple of 32) -> int8 [n, k/2] (even column in the low nibble), float8_e8m0fnu [n, k/32].

    Rounds to the nearest E2M1 value, ties to the even code. Raises ValueError for another k.
    """
    n, k = weight.shape
    if k % BLOCK:
        raise ValueError(f"weight {tuple(weight.shape)}: columns must be a multiple of {BLOCK}")
    groups = weight.float().reshape(n, k // BLOCK, BLOCK)
    exponent = _exponent(groups.abs().amax(-1), _E2M1[-1])
    scaled = groups * torch.exp2(-exponent).unsqueeze(-1)
    return pack_e2m1(scaled.reshape(n, k)), torch.exp2(exponent).to(torch.float8_e8m0fnu)


def pack_e2m1(values: torch.Tensor) -> torch.Tensor:
    """[..., k] float -> int8 [..., k/2]: nearest E2M1 codes, ties to the even one, clipped to +-6, no -0."""
    middle = (torch.tensor(_E2M1[1:]) + torch.tensor(_E2M1[:-1])) / 2
    magnitude = values.abs().contiguous()
    down, up = torch.bucketize(magnitude, middle), torch.bucketize(magnitude, middle, right=True)
    code = torch.where((down != up) & (down % 2 == 1), up, down)
    code = (code + 8 * (torch.signbit(values) & (code > 0))).to(torch.uint8)
    return (code[..., 0::2] | (code[..., 1::2] << 4)).view(torch.int8)


def decode_mxfp4(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """int8 or uint8 [..., k/2] and scales [..., k/32] (float8_e8m0fnu or fp32 powers of two) -> fp32 [..., k]."""
    codes = packed.view(torch.uint8)
    nibbles = torch.stack([codes & 0x0F, codes >> 4], dim=-1).flatten(-2).long()
    table = torch.tensor([*_E2M1, *(-value for value in _E2M1)], device=packed.device)
    return (table[nibbles].unflatten(-1, (-1, BLOCK)) * scale.float().unsqueeze(-1)).flatten(-2)


def _exponent(amax: torch.Tensor, largest: float) -> torch.Tensor:
    """Smallest integer e with amax <= largest * 2**e, as float; exact, for log2 in fp32 is not."""
    mantissa, exponent = torch.frexp(amax.double() / largest)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    return torch.where(amax == 0, torch.full_like(exponent, -126), exponent.clamp(-126, 127)).float()
