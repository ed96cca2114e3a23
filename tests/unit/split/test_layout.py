"""Rows of a weight as views, in every layout that is cut: exact against the published formula and against a copy."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv41_dist.adapters import _split_layout as layout
from dsv41_dist.comm import TileSplit


def numbered(rows: int, groups: int) -> torch.Tensor:
    gen = torch.Generator().manual_seed(rows * 1000 + groups)
    return torch.randint(0, 256, (rows, groups), generator=gen, dtype=torch.uint8)


@given(rows=st.integers(1, 300), groups=st.integers(1, 21))
@settings(max_examples=30, deadline=None)
def test_the_swizzle_is_the_documented_formula_and_goes_back(rows, groups):
    scales = numbered(rows, groups)
    flat = layout.swizzle_128x4(scales)
    r = torch.arange(rows).view(-1, 1)
    g = torch.arange(groups).view(1, -1)
    at = (r // 128) * (-(-groups // 4)) * 512 + (g // 4) * 512 + (r % 32) * 16 + ((r // 32) % 4) * 4 + g % 4
    assert torch.equal(flat[at], scales)
    rest = torch.ones(flat.numel(), dtype=torch.bool)
    rest[at.reshape(-1)] = False
    assert not flat[rest].any(), "padding is zero"
    assert torch.equal(layout.unswizzle_128x4(flat, rows, groups), scales)


def test_a_buffer_of_another_size_is_refused():
    with pytest.raises(ValueError, match="has 512 bytes"):
        layout.unswizzle_128x4(torch.zeros(512, dtype=torch.uint8), 129, 4)


# A layer as the releases leave it after loading; the real classes are driven in tests/engine.


class UnquantizedLinearMethod:
    pass


class Fp8LinearMethod:
    use_marlin = False
    block_quant = True

    def __init__(self, block=(32, 32), mxfp8=False, swizzled=False, backend="cutlass"):
        self.weight_block_size = list(block)
        self.use_mxfp8 = mxfp8
        self.block_fp8_as_mxfp8 = swizzled and not mxfp8
        self.mxfp8_dense_backend = SimpleNamespace(
            is_flashinfer_cutlass=lambda: backend == "cutlass", is_flashinfer_cutedsl=lambda: backend == "cutedsl"
        )


def fp8_layer(n: int, k: int, method: Fp8LinearMethod, bf16_copy: bool = False) -> torch.nn.Module:
    layer = torch.nn.Module()
    layer.quant_method = method
    held = {"weight": numbered(n, k).view(torch.float8_e4m3fn)}
    bn, bk = (1, 32) if method.use_mxfp8 else method.weight_block_size
    scales = numbered(-(-n // bn), -(-k // bk))
    held["weight_scale_inv"] = scales if method.use_mxfp8 else scales.float()
    swizzled = method.use_mxfp8 or method.block_fp8_as_mxfp8
    layer.block_fp8_mxfp8_ready = swizzled
    if swizzled:
        held["weight_scale_inv_swizzled"] = layout.swizzle_128x4(scales.repeat_interleave(bn, 0)[:n])
    for name, tensor in held.items():
        layer.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
    if bf16_copy:
        layer.register_buffer("_block_fp8_bf16_weight", numbered(n, k).bfloat16(), persistent=False)
    return layer


@st.composite
def cuts(draw):
    world = draw(st.integers(2, 6))
    tiles = draw(st.integers(world, world + 9))
    split = TileSplit(tiles * layout.TILE, layout.TILE, world)
    rank = draw(st.integers(0, world - 1))
    first = split.window(rank)[0] if draw(st.booleans()) else split.start(rank)
    return split, first, first + (split.widest if first != split.start(rank) else split.size(rank))


@given(cut=cuts(), groups=st.integers(1, 9), kind=st.sampled_from(["block 32", "block 128", "mxfp8", "block as mxfp8"]))
@settings(max_examples=40, deadline=None)
def test_a_slice_is_the_rows_of_every_tensor_and_shares_their_memory(cut, groups, kind):
    split, lo, hi = cut
    n, k = split.n, 32 * groups
    method = {
        "block 32": Fp8LinearMethod(),
        "block 128": Fp8LinearMethod(block=(128, 128)),
        "mxfp8": Fp8LinearMethod(mxfp8=True),
        "block as mxfp8": Fp8LinearMethod(swizzled=True, backend="cutedsl"),
    }[kind]
    layer = fp8_layer(n, k, method, bf16_copy=kind == "block 32")
    found = layout.kind_of(layer)
    part = layout.slice_layer(layer, found, lo, hi)
    assert set(found.rows_per) == {*layer._parameters, *layer._buffers}
    assert part.weight.view(torch.uint8).tolist() == layer.weight.view(torch.uint8)[lo:hi].tolist()
    for name in found.rows_per:
        whole, piece = getattr(layer, name), getattr(part, name)
        assert piece.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
        assert piece.is_contiguous()
    if "weight_scale_inv_swizzled" in found.rows_per:
        rows = layout.unswizzle_128x4(layer.weight_scale_inv_swizzled, n, groups)
        assert torch.equal(part.weight_scale_inv_swizzled, layout.swizzle_128x4(rows[lo:hi].contiguous()))
    bn = 1 if kind == "mxfp8" else method.weight_block_size[0]
    expanded = layer.weight_scale_inv.repeat_interleave(bn, 0)[lo:hi]
    assert torch.equal(part.weight_scale_inv.repeat_interleave(bn, 0), expanded)


def test_flags_of_a_scale_travel_with_it():
    layer = fp8_layer(256, 64, Fp8LinearMethod())
    layer.weight_scale_inv.power_of_two = True
    layer.weight_scale_inv.format_ue8m0 = False
    part = layout.slice_layer(layer, layout.kind_of(layer), 128, 256)
    assert (part.weight_scale_inv.power_of_two, part.weight_scale_inv.format_ue8m0) == (True, False)


def plain_layer(weight: torch.Tensor) -> torch.nn.Module:
    layer = torch.nn.Module()
    layer.quant_method = UnquantizedLinearMethod()
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    return layer


def spoiled(kind: str) -> torch.nn.Module:
    if kind == "strided":
        return plain_layer(torch.zeros(64, 256).t())
    if kind == "int8":
        return plain_layer(torch.zeros(256, 64, dtype=torch.int8))
    if kind == "amx":
        layer = plain_layer(torch.zeros(256, 64))
        layer.use_intel_amx_backend = True
        return layer
    if kind == "trtllm":
        return fp8_layer(256, 64, Fp8LinearMethod(mxfp8=True, backend="trtllm"))
    layer = fp8_layer(256, 64, Fp8LinearMethod())
    if kind == "marlin":
        layer.quant_method.use_marlin = True
    elif kind == "per tensor":
        layer.quant_method.block_quant = False
    elif kind == "deepgemm":
        layer.weight_scale_inv_deepgemm = torch.nn.Parameter(torch.zeros(1), requires_grad=False)
    elif kind == "packed scale":
        layer.weight_scale_inv = torch.nn.Parameter(torch.zeros(8, 2, dtype=torch.int32), requires_grad=False)
    elif kind == "unknown tensor":
        layer.register_buffer("surprise", torch.zeros(1))
    elif kind == "other method":
        layer.quant_method = SimpleNamespace()
    elif kind == "shuffled":
        layer.weight.is_shuffled = True
    return layer


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("strided", "not row-major"),
        ("int8", "unquantized weight of torch.int8"),
        ("amx", "AMX"),
        ("trtllm", "layout of its own"),
        ("marlin", "Marlin"),
        ("per tensor", "per tensor"),
        ("deepgemm", "DeepGEMM"),
        ("packed scale", "weight_scale_inv is torch.int32"),
        ("unknown tensor", "holds surprise"),
        ("other method", "SimpleNamespace"),
        ("shuffled", "shuffled"),
    ],
)
def test_a_layout_that_is_not_known_to_be_by_rows_is_declined_with_the_reason(kind, reason):
    with pytest.raises(layout.CannotSlice, match=reason):
        layout.kind_of(spoiled(kind))


def test_a_cut_through_a_block_is_declined():
    layer = fp8_layer(256, 128, Fp8LinearMethod(block=(128, 128)))
    with pytest.raises(layout.CannotSlice, match="blocks of 128 rows"):
        layout.slice_layer(layer, layout.kind_of(layer), 64, 256)
