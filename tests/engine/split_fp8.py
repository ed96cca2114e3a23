"""Real quantized ReplicatedLinear layers for the split probes. The engine's block GEMM is a Triton kernel and runs in
the interpreter, slowly (`real_block_gemm`); MXFP8's needs a GPU. Elsewhere they are deterministic stand-ins that read
weight and scales where the real kernels do (row-major blocks, or the flat 128x4 buffer), dequantize, and sum over K in
an order that does not depend on rows or columns."""

from __future__ import annotations

import sys
from types import ModuleType

import torch
from sglang.srt.layers.linear import ReplicatedLinear
from sglang.srt.layers.quantization import fp8, fp8_utils
from sglang.srt.layers.quantization.mxfp8_input import Mxfp8SwizzledInput

from dsv41_dist.adapters._split_layout import swizzle_128x4, unswizzle_128x4


def block_layer(n: int, k: int, block: int = 32) -> ReplicatedLinear:
    """A checkpoint's block fp8 layer after the real process_weights_after_loading."""
    config = fp8.Fp8Config(
        is_checkpoint_fp8_serialized=True, activation_scheme="dynamic", weight_block_size=[block, block]
    )
    layer = ReplicatedLinear(k, n, bias=False, params_dtype=torch.bfloat16, quant_config=config)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(n, k).clamp(-4, 4).to(torch.float8_e4m3fn))
        exponents = torch.randint(-9, -4, layer.weight_scale_inv.shape)
        layer.weight_scale_inv.copy_(torch.exp2(exponents.float()))
    layer.quant_method.process_weights_after_loading(layer)
    for parameter in layer.parameters():
        parameter.requires_grad_(False)
    layer.quant_method.w8a8_block_fp8_linear = block_gemm
    return layer


def real_block_gemm(layer: ReplicatedLinear) -> None:
    """Put the engine's own kernel back. It looks for a tuned configuration by the name of the GPU."""
    sys.modules[fp8_utils.w8a8_block_fp8_matmul_triton.__module__].get_device_name = lambda *_: "no GPU"
    layer.quant_method.w8a8_block_fp8_linear = fp8_utils.triton_w8a8_block_fp8_linear


def mxfp8_layer(n: int, k: int) -> ReplicatedLinear:
    """The same, with the view that FlashInfer's kernels read, made by the engine's own function."""
    layer = block_layer(n, k)
    method = layer.quant_method
    flashinfer = sys.modules.setdefault("flashinfer", ModuleType("flashinfer"))
    flashinfer.block_scale_interleave = swizzle_128x4
    method.block_fp8_as_mxfp8 = True
    method.mxfp8_dense_backend = fp8_utils.Mxfp8DenseGemmBackend.FLASHINFER_CUTLASS
    method.w8a8_mxfp8_linear = mxfp8_gemm
    method._prepare_block_fp8_as_mxfp8(layer)
    assert layer.block_fp8_mxfp8_ready
    return layer


def quantized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[m, k] -> e4m3 [m, k] and powers of two [m, k / 32]: what a producer hands to a layer."""
    groups = x.float().view(x.shape[0], -1, 32)
    scale = torch.exp2(torch.ceil(torch.log2(groups.abs().amax(-1).clamp(min=1e-20) / 448)))
    return (groups / scale[..., None]).to(torch.float8_e4m3fn).view(x.shape), scale


def pair_input(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return quantized(x)


def swizzled_input(x: torch.Tensor) -> Mxfp8SwizzledInput:
    q, scale = quantized(x)
    return Mxfp8SwizzledInput(q, swizzle_128x4((torch.log2(scale) + 127).to(torch.uint8)))


def _product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.stack([(row * w).sum(-1) for row in x]).to(torch.bfloat16)


def _activation(x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    q, scale = quantized(x) if scale is None else (x, scale)
    return q.float() * scale.repeat_interleave(32, 1)


def block_gemm(input, weight, block_size, weight_scale, input_scale=None, bias=None, **_):
    rows, cols = block_size
    scale = weight_scale.repeat_interleave(rows, 0).repeat_interleave(cols, 1)
    assert scale.shape == weight.shape
    return _product(_activation(input, input_scale), weight.float() * scale)


def mxfp8_gemm(input, weight, weight_scale, input_scale=None, bias=None, **_):
    n, k = weight.shape
    scale = torch.exp2(unswizzle_128x4(weight_scale.view(torch.uint8), n, k // 32).float() - 127)
    if input_scale is not None:
        input_scale = torch.exp2(unswizzle_128x4(input_scale, input.shape[0], k // 32).float() - 127)
    return _product(_activation(input, input_scale), weight.float() * scale.repeat_interleave(32, 1))
