"""The exact twin: found where there is one, never where there is none; its product; the kernel in the interpreter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv41_dist.kernels import main_proj as mp


def representable(n: int, groups: int, low: int, high: int, seed: int) -> torch.Tensor:
    """A float64 weight [n, 32 groups] that has a twin: any finite e4m3 codes under any exponents from low to high."""
    gen = torch.Generator().manual_seed(seed)
    magnitude = torch.randint(0, 0x7F, (n, groups, 32), generator=gen, dtype=torch.uint8)
    sign = torch.randint(0, 2, (n, groups, 32), generator=gen, dtype=torch.uint8) * 0x80
    codes = (magnitude | sign).view(torch.float8_e4m3fn)
    # Groups that do not reach e4m3's largest values: their smallest shift differs from the one they were made with.
    limit = torch.randint(1, 0x7F, (n, groups, 1), generator=gen, dtype=torch.uint8)
    codes = torch.where(magnitude <= limit, codes.view(torch.uint8), sign).view(torch.float8_e4m3fn)
    shift = torch.randint(low, high + 1, (n, groups, 1), generator=gen)
    return torch.ldexp(codes.double(), shift).view(n, groups * 32)


def brute_force(group: torch.Tensor) -> bool:
    """Whether any exponent that can be stored gives back these 32 values (float64), by trying all of them."""
    for shift in range(-126, 128):
        scaled = torch.ldexp(group, torch.tensor(-shift))
        if scaled.abs().max() > 448:
            continue
        if torch.equal(scaled.float().to(torch.float8_e4m3fn).double(), scaled):
            return True
    return False


@given(
    n=st.integers(1, 9),
    groups=st.integers(1, 5),
    # bfloat16 holds every e4m3 times 2^s while 2^(s - 9) is one of its values; fp16 from 2^-24 up to 65504.
    kind=st.sampled_from([(torch.bfloat16, -120, 119), (torch.float32, -120, 119), (torch.float16, -15, 7)]),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=60, deadline=None)
def test_a_weight_that_has_a_twin_is_always_found_and_given_back_bit_for_bit(n, groups, kind, seed):
    dtype, low, high = kind
    exact = representable(n, groups, low, high, seed)
    weight = exact.to(dtype)
    assert torch.equal(weight.double(), exact)
    twin = mp.exact_twin(weight)
    assert twin is not None
    assert (twin.codes.shape, twin.exponents.shape) == ((groups, n, 32), (groups, n))
    back = mp.weight_of(twin, dtype)
    assert torch.equal(back.view(torch.uint8), weight.view(torch.uint8))
    assert twin.nbytes == n * groups * 33


@given(seed=st.integers(0, 2**31), spoil=st.sampled_from(["bit", "spread", "none"]))
@settings(max_examples=40, deadline=None)
def test_the_decision_is_that_of_trying_every_exponent(seed, spoil):
    gen = torch.Generator().manual_seed(seed)
    weight = representable(1, 1, -20, 20, seed).bfloat16()
    at = int(torch.randint(0, 32, (), generator=gen))
    if spoil == "bit":
        weight.view(torch.int16)[0, at] ^= 1 << int(torch.randint(0, 5, (), generator=gen))
    elif spoil == "spread":
        weight[0, at] = 2.0 ** int(torch.randint(-40, 40, (), generator=gen))
    assert (mp.exact_twin(weight) is not None) == brute_force(weight.double().view(-1))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_weight_that_is_not_finite_has_none(value):
    weight = torch.ones(4, 64, dtype=torch.bfloat16)
    weight[3, 40] = value
    assert mp.exact_twin(weight) is None


def test_zeros_of_both_signs_are_kept():
    weight = torch.zeros(2, 64, dtype=torch.bfloat16)
    weight[1] = -0.0
    twin = mp.exact_twin(weight)
    assert twin is not None
    assert torch.equal(mp.weight_of(twin).view(torch.int16), weight.view(torch.int16))


def test_k_must_be_whole_groups():
    assert mp.exact_twin(torch.zeros(4, 48, dtype=torch.bfloat16)) is None


@pytest.mark.parametrize(("n", "groups"), [(1280, 480), (2560, 480), (1280, 800), (64, 1), (100, 7), (5120, 480)])
def test_chunks_cover_every_group_once(n, groups):
    chunks, each = mp.chunks_of(n, groups)
    assert (chunks - 1) * each < groups <= chunks * each
    assert chunks * -(-n // mp.TILE_N) <= max(264, -(-n // mp.TILE_N))


def case(n: int, groups: int, m: int, seed: int = 0):
    twin = mp.exact_twin(representable(n, groups, -9, -3, seed).bfloat16())
    assert twin is not None
    return torch.randn(m, 32 * groups, generator=torch.Generator().manual_seed(seed + 1)).bfloat16(), twin


def reference(x, twin):
    return x.double() @ mp.weight_of(twin, torch.float32).double().t()


def close(got, x, twin, rounding=2.0**-8):
    """Within one rounding to bf16 and a float32 sum's error, of the sum of magnitudes."""
    want = reference(x, twin)
    size = x.double().abs() @ mp.weight_of(twin, torch.float32).double().abs().t()
    error = (got.double() - want).abs()
    assert bool((error <= want.abs() * rounding + size * 2.0**-16).all()), float(error.max())


@pytest.mark.parametrize(("n", "groups"), [(96, 5), (64, 33), (130, 16)])
def test_the_product_is_that_of_the_weight(n, groups):
    x, twin = case(n, groups, 6)
    got = mp.main_proj(x, twin)
    assert (got.dtype, got.shape) == (torch.bfloat16, (6, n))
    close(got, x, twin)


def test_a_row_has_the_same_bits_whatever_is_beside_it():
    x, twin = case(96, 9, 16)
    whole = mp.main_proj(x, twin)
    for m in (1, 2, 7, 16):
        assert torch.equal(mp.main_proj(x[:m], twin).view(torch.int16), whole[:m].view(torch.int16))


@pytest.mark.parametrize(
    "x",
    [
        torch.zeros(17, 64, dtype=torch.bfloat16),
        torch.zeros(0, 64, dtype=torch.bfloat16),
        torch.zeros(1, 32, dtype=torch.bfloat16),
        torch.zeros(1, 64),
        torch.zeros(64, dtype=torch.bfloat16),
    ],
)
def test_what_does_not_fit_is_said(x):
    _, twin = case(64, 2, 1)
    with pytest.raises(ValueError, match=r"allowed is bfloat16 \[1 to 16, 64\]"):
        mp.main_proj(x, twin)


@pytest.mark.parametrize(("n", "groups", "m"), [(64, 4, 1), (96, 5, 6), (130, 18, 16)])
def test_the_kernel_is_the_twin(interpreter, n, groups, m):
    from dsv41_dist.kernels import main_proj_triton

    x, twin = case(n, groups, m)
    got = main_proj_triton.launch(x, twin)
    close(got, x, twin, rounding=2.0**-7)  # the interpreter's cast to bf16 cuts off, a GPU's rounds to nearest
    # The order within a group of 32 is the only other freedom: at most one bf16 step apart.
    want = mp.main_proj_torch(x, twin)
    torch.testing.assert_close(got, want, rtol=2.0**-7, atol=1e-4)
    part = main_proj_triton.launch(x[: (m + 1) // 2].contiguous(), twin)
    assert torch.equal(part.view(torch.int16), got[: (m + 1) // 2].view(torch.int16))
