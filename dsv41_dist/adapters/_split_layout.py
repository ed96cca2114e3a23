"""Rows of a linear layer's weight, in the layouts the releases keep it in, as views. Pure tensors; no engine, no ranks.

`slice_layer` gives what a quantized linear needs in order to compute columns lo..hi of its output: an object with the
layer's attributes, cut to those rows. Nothing is copied, and a layout that cannot be cut so is declined with a reason.

Scales of MXFP8 in the 128x4 layout of FlashInfer (and of cuBLAS) are one flat buffer. Scale (row r, 32-wide group g) of
G groups is at (r // 128) ceil(G / 4) 512 + (g // 4) 512 + (r % 32) 16 + (r // 32 % 4) 4 + g % 4, so 128 rows are one
contiguous range.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

__all__ = ["TILE", "CannotSlice", "Kind", "kind_of", "slice_layer", "swizzle_128x4", "unswizzle_128x4"]

TILE = 128
_GROUP = 32
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
# Flags that a scale or weight tensor carries as Python attributes and that the releases' kernels read.
_FLAGS = ("format_ue8m0", "power_of_two")


class CannotSlice(Exception):
    """Why a layer's weight cannot be cut into rows."""


class Kind(NamedTuple):
    """What a layer is made of: the name of its layout, and the attributes that are cut by rows.

    `rows_per`: for each attribute, how many weight rows one of its own rows stands for; 0: the flat 128x4 buffer.
    """

    name: str
    rows_per: dict[str, int]


def swizzle_128x4(scales: torch.Tensor) -> torch.Tensor:
    """[rows, groups], any 1-byte dtype, -> the flat 128x4 buffer; rows padded to 128 and groups to 4 with 0."""
    rows, groups = scales.shape
    padded = torch.zeros(_up(rows, 128), _up(groups, 4), dtype=scales.dtype, device=scales.device)
    padded[:rows, :groups] = scales
    tiles = padded.view(padded.shape[0] // 128, 4, 32, padded.shape[1] // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)


def unswizzle_128x4(flat: torch.Tensor, rows: int, groups: int) -> torch.Tensor:
    """The inverse of `swizzle_128x4`: -> [rows, groups]. Raises ValueError when the buffer has another size."""
    high, wide = _up(rows, 128), _up(groups, 4)
    if flat.numel() != high * wide:
        raise ValueError(f"flat has {flat.numel()} bytes: [{rows}, {groups}] in 128x4 has {high * wide}")
    tiles = flat.view(high // 128, wide // 4, 32, 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(high, wide)[:rows, :groups]


def kind_of(layer: Any) -> Kind:
    """How this layer's weight is laid out. Raises CannotSlice with the reason for everything not known to be row-wise.

    `layer` is the engine's ReplicatedLinear after its weights were processed (0.5.21 to 0.5.23).
    """
    method = layer.quant_method
    name = type(method).__name__
    weight = _tensor(layer, "weight")
    if weight.dim() != 2 or not weight.is_contiguous():
        raise CannotSlice(f"the weight is {tuple(weight.shape)} with strides {weight.stride()}, not row-major [n, k]")
    if getattr(layer, "use_intel_amx_backend", False):
        raise CannotSlice("the weight is packed for AMX")
    if name == "UnquantizedLinearMethod":
        if weight.dtype not in _FLOATS:
            raise CannotSlice(f"an unquantized weight of {weight.dtype}")
        kind = Kind(str(weight.dtype).removeprefix("torch."), {"weight": 1})
    elif name == "Fp8LinearMethod":
        kind = _fp8_kind(layer, method, weight)
    else:
        raise CannotSlice(f"the quantization method {name} is not one whose layout is known")
    held = {**layer._parameters, **layer._buffers}
    unknown = sorted(key for key, value in held.items() if value is not None and key not in (*kind.rows_per, "bias"))
    if unknown:
        raise CannotSlice(f"it holds {', '.join(unknown)}, whose layout is not known")
    return kind


def slice_layer(layer: Any, kind: Kind, lo: int, hi: int) -> SimpleNamespace:
    """Columns lo..hi of the layer's output, as what `quant_method.apply` takes for a layer: views, no copy.

    Raises CannotSlice where a boundary cuts through a scale block.
    """
    n, k = layer.weight.shape
    out = SimpleNamespace(
        input_size=k,
        output_size=hi - lo,
        input_size_per_partition=k,
        output_size_per_partition=hi - lo,
        output_partition_sizes=[hi - lo],
        logical_widths=[hi - lo],
        input_scale=None,
        deepgemm_mxfp8_input=False,
        quant_method=layer.quant_method,
    )
    for name in ("params_dtype", "orig_dtype", "block_fp8_mxfp8_ready", "keep_plain_weight_layout"):
        if hasattr(layer, name):
            setattr(out, name, getattr(layer, name))
    for name, rows in kind.rows_per.items():
        source = _tensor(layer, name)
        if rows:
            if lo % rows or (hi % rows and hi != n):
                raise CannotSlice(f"columns {lo} to {hi} cut through the blocks of {rows} rows of {name}")
            view = source.detach()[lo // rows : -(-hi // rows)]
        else:
            tile = 128 * _up(k // _GROUP, 4)
            view = source.detach().view(-1)[lo // 128 * tile : hi // 128 * tile]
        part = torch.nn.Parameter(view, requires_grad=source.requires_grad)
        for flag in _FLAGS:
            if hasattr(source, flag):
                setattr(part, flag, getattr(source, flag))
        setattr(out, name, part)
    return out


def _fp8_kind(layer: Any, method: Any, weight: torch.Tensor) -> Kind:
    if method.use_marlin:
        raise CannotSlice("the weight is packed for Marlin")
    if not method.block_quant:
        raise CannotSlice("fp8 with a scale per tensor or channel")
    if weight.dtype != torch.float8_e4m3fn:
        raise CannotSlice(f"a block fp8 weight of {weight.dtype}")
    if getattr(layer, "deepgemm_mxfp8_input", False) or hasattr(layer, "weight_scale_inv_deepgemm"):
        raise CannotSlice("the scales are packed for DeepGEMM, column-major")
    for module_held, name in ((layer.weight, "is_shuffled"), (layer, "aiter_bpreshuffled")):
        if getattr(module_held, name, False):
            raise CannotSlice("the weight is shuffled for the kernel")
    n, k = weight.shape
    rows_per = {"weight": 1}
    scale = _tensor(layer, "weight_scale_inv")
    block, wide = (1, _GROUP) if method.use_mxfp8 else method.weight_block_size
    wanted = (-(-n // block), -(-k // wide))
    if scale.dtype not in (torch.float32, torch.uint8) or tuple(scale.shape) != wanted or not scale.is_contiguous():
        raise CannotSlice(
            f"weight_scale_inv is {scale.dtype} {tuple(scale.shape)} with strides {scale.stride()}, "
            f"not row-major {wanted} for blocks of {block} x {wide}"
        )
    rows_per["weight_scale_inv"] = block
    if getattr(layer, "_block_fp8_bf16_weight", None) is not None:
        rows_per["_block_fp8_bf16_weight"] = 1
    if not (method.use_mxfp8 or (method.block_fp8_as_mxfp8 and layer.block_fp8_mxfp8_ready)):
        return Kind(f"fp8 in {block} x {wide} blocks", rows_per)
    backend = method.mxfp8_dense_backend
    if not (backend.is_flashinfer_cutlass() or backend.is_flashinfer_cutedsl()):
        raise CannotSlice(f"the MXFP8 backend {backend} keeps weight or scales in a layout of its own")
    flat = _tensor(layer, "weight_scale_inv_swizzled")
    size = _up(n, 128) * _up(k // _GROUP, 4)
    if flat.element_size() != 1 or flat.numel() != size or not flat.is_contiguous():
        raise CannotSlice(f"weight_scale_inv_swizzled is {flat.dtype} with {flat.numel()} elements, not {size} bytes")
    rows_per["weight_scale_inv_swizzled"] = 0
    return Kind("MXFP8, scales in 128x4", rows_per)


def _tensor(layer: Any, name: str) -> torch.Tensor:
    value = getattr(layer, name, None)
    if not isinstance(value, torch.Tensor):
        raise CannotSlice(f"it has no {name}")
    return value


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
