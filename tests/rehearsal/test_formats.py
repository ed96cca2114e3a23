"""The checkpoint's number formats against their definitions, written out value by value."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv41_dist.rehearsal import formats

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def draw(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator) * torch.exp(3 * torch.randn(shape[0], 1, generator=generator))


@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 2**31))
def test_block_fp8_uses_the_smallest_power_of_two_that_fits(seed):
    weight = draw(seed, 64, 96)
    codes, scale = formats.encode_block_fp8(weight)
    assert (codes.dtype, scale.dtype) == (torch.float8_e4m3fn, torch.float8_e8m0fnu)
    assert (codes.shape, scale.shape) == ((64, 96), (2, 3))
    for i in range(2):
        for j in range(3):
            amax = weight[32 * i : 32 * i + 32, 32 * j : 32 * j + 32].abs().max().item()
            assert amax / 448 <= scale[i, j].float().item() < 2 * amax / 448
    decoded = formats.decode_block_fp8(codes, scale)
    # e4m3 keeps four significant bits: half a unit in the last place is 1/16 of the value at most.
    bound = torch.maximum(weight.abs() / 16, scale.float().repeat_interleave(32, 0).repeat_interleave(32, 1) * 2**-10)
    assert ((decoded - weight).abs() <= bound).all()


@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 2**31))
def test_mxfp4_takes_the_nearest_value_of_its_table(seed):
    weight = draw(seed, 8, 64)
    packed, scale = formats.encode_mxfp4(weight)
    assert (packed.dtype, packed.shape, scale.shape) == (torch.int8, (8, 32), (8, 2))
    table = torch.tensor([*E2M1, *(-v for v in E2M1)])
    codes = packed.view(torch.uint8).long()
    unit = scale.float().repeat_interleave(32, 1)
    for parity in (0, 1):  # the even column is in the low nibble
        chosen = table[(codes >> 4 * parity) & 15] * unit[:, parity::2]
        every = table[:, None, None] * unit[None, :, parity::2]
        nearest = (every - weight[None, :, parity::2]).abs().amin(0)
        assert torch.equal((chosen - weight[:, parity::2]).abs(), nearest)
    decoded = formats.decode_mxfp4(packed, scale)
    assert torch.equal(formats.decode_mxfp4(*formats.encode_mxfp4(decoded)), decoded)


def test_ties_go_to_the_even_code():
    values = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.75, 7.0, -7.0])
    packed = formats.pack_e2m1(values).view(torch.uint8)
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten()
    assert codes.tolist() == [0, 2, 2, 4, 4, 6, 6, 10, 7, 15]


def test_rows_round_trip_exactly_when_they_are_representable():
    rows = torch.tensor([[0.0, 1.0, -448.0, 0.5] * 8, [2.0**-20] * 32]).repeat(1, 2)
    assert torch.equal(formats.decode_row_fp8(*formats.encode_row_fp8(rows)), rows)


def test_a_block_of_zeros_decodes_to_zeros():
    zeros = torch.zeros(32, 32)
    assert torch.equal(formats.decode_block_fp8(*formats.encode_block_fp8(zeros)), zeros)
    assert torch.equal(formats.decode_mxfp4(*formats.encode_mxfp4(zeros)), zeros)


@pytest.mark.parametrize("shape", [(31, 32), (32, 40)])
def test_sizes_that_are_no_multiple_of_the_block_are_refused(shape):
    with pytest.raises(ValueError, match=rf"\({shape[0]}, {shape[1]}\).*multiples of 32"):
        formats.encode_block_fp8(torch.zeros(shape))
    if shape[1] % 32:
        with pytest.raises(ValueError, match="multiple of 32"):
            formats.encode_mxfp4(torch.zeros(shape))
