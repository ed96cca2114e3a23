"""Attention for the fp8 gathers' probe: the release's own MQALayer.forward around the engine's quantized projections.

What a CPU cannot run is replaced: rotary embedding, the key store and attention itself (plain torch in which a row
depends on those before it), and for power-of-two scales the quantizer's CUDA kernel. With fp32 scales the engine's own
Triton kernels, quantizer and block GEMM, run in the interpreter; it is slow, so elsewhere the GEMM is plain torch.
"""

from __future__ import annotations

import contextlib
import sys
from types import SimpleNamespace
from typing import Any

import torch
from sglang.kernels.ops.quantization import fp8_kernel
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import ReplicatedLinear, RowParallelLinear
from sglang.srt.layers.quantization import fp8, fp8_utils
from sglang.srt.models import deepseek_v4 as v4
from sglang.srt.runtime_context import get_parallel

from dsv41_dist.adapters import prefill_sp
from dsv41_dist.adapters._split_layout import swizzle_128x4
from tests.engine import prefill_model as small
from tests.engine import split_fp8

HIDDEN, Q_LORA, HEADS, WIDE, ROPE, O_LORA = small.HIDDEN, 64, 4, 32, 16, 16


def stand_ins() -> None:
    small.stand_ins()
    sys.modules[fp8_utils.w8a8_block_fp8_matmul_triton.__module__].get_device_name = lambda *_: "no GPU"
    gemm = fp8_utils.w8a8_block_fp8_matmul_triton
    fp8_utils.w8a8_block_fp8_matmul_triton = lambda *a, **k: (gemm if Attention.kind == "fp32" else _gemm)(*a, **k)
    fp8_kernel._run_per_token_group_quant_8bit_kernel = _power_of_two_kernel
    fp8_utils.flashinfer_mxfp8_quantize = _mxfp8_quantize
    split_fp8._product = lambda x, w: (x @ w.t()).to(torch.bfloat16)  # of all rows, in stock as here
    torch.cuda.is_current_stream_capturing = lambda: False
    v4.fused_rope_inplace = _rope
    v4.fused_q_norm_rope = _rope_into
    # As on CUDA, whose quantizer for fp32 scales takes the same arguments as this Triton kernel's launcher.
    fp8_utils.per_token_group_quant_fp8 = fp8_kernel._per_token_group_quant_8bit_raw


def _power_of_two_kernel(x, x_q, x_s, group_size, eps, fp8_min, fp8_max, *, scale_ue8m0, fuse_silu_and_mul, masked_m):
    assert (scale_ue8m0, fuse_silu_and_mul, masked_m, x_s.dtype) == (True, False, None, torch.float32)
    groups = x.float().unflatten(-1, (-1, group_size))
    scale = torch.exp2(torch.ceil(torch.log2(groups.abs().amax(-1).clamp(min=eps) / fp8_max)))
    x_s.copy_(scale)
    x_q.copy_((groups / scale.unsqueeze(-1)).clamp(fp8_min, fp8_max).flatten(-2).to(x_q.dtype))


def _gemm(values, weight, scales, weight_scales, block, output_dtype):
    assert (values.dtype, scales.dtype, list(block)) == (torch.float8_e4m3fn, torch.float32, [32, 32])
    rows = values.float() * scales.repeat_interleave(32, 1)
    columns = weight.float() * weight_scales.repeat_interleave(32, 0).repeat_interleave(32, 1)
    return (rows @ columns.t()).to(output_dtype)


def _mxfp8_quantize(x, is_sf_swizzled_layout, alignment):
    assert (is_sf_swizzled_layout, alignment) == (True, 32)
    values, scale = split_fp8.quantized(x)
    return values, swizzle_128x4((torch.log2(scale) + 127).to(torch.uint8))


def _rope(x, _, freqs, positions, inverse=False):
    """In place: turned by an angle of the row's position, in float64."""
    angle = positions.double() * (-0.1 if inverse else 0.1)
    cos, sin = angle.cos().view(-1, 1, 1), angle.sin().view(-1, 1, 1)
    a, b = x.double().chunk(2, -1)
    x.copy_(torch.cat([a * cos - b * sin, a * sin + b * cos], -1))


def _rope_into(q, out, eps, freqs, positions):
    out.copy_(q)
    _rope(out[..., -ROPE:], None, freqs, positions)


class Pool:
    """Where keys go; what the engine asks of a pool beside that."""

    uniform_fp8, request_window = False, None

    def set_swa_key_buffer_radix_fused_norm_rope(self, *, kv, kv_weight, positions, **_):
        self.keys = (kv.float() * kv_weight.float() * (1 + positions.unsqueeze(1) % 3)).clone()


class Backend(small.Backend):
    def __init__(self, tail: Any) -> None:
        super().__init__(tail)
        self.token_to_kv_pool = Pool()

    def get_swa_out_cache_loc(self, forward_batch):
        return None

    def forward_low_ratio_sources(self, *, layer, **more):
        assert layer.compressor is not None or layer.indexer is not None
        super().forward_low_ratio_sources(**more)

    def forward(self, q, k, v, layer, forward_batch, **_):
        """[rows, heads, wide]: a row's queries times the mean of the keys up to it."""
        keys = self.token_to_kv_pool.keys
        assert keys.shape[0] == q.shape[0]
        mean = keys.cumsum(0) / torch.arange(1, len(keys) + 1).unsqueeze(1)
        return (q.float() * mean.unsqueeze(1)).to(q.dtype)


class Attention(v4.MQALayer):
    """MQALayer with these projections. `kind`: of wqkv_a's rounding; `reads`: layers whose rows something else reads;
    `fused`: whether the two projections of the rows are one."""

    kind = "powers"
    fused = True
    reads: dict[int, str] = {}
    is_dsv41 = True

    def __init__(self, layer_id: int) -> None:
        torch.nn.Module.__init__(self)
        parallel = get_parallel()
        self.layer_id, self.heights, self.compress_ratio = layer_id, [], 2
        self.attn_tp_size, self.attn_tp_rank = parallel.tp_size, parallel.tp_rank
        self.alt_streams, self._multi_stream_bs_limit, self.use_mega_attention = None, 64, False
        self.dsa_enable_prefill_cp = self.q_head_norm = self.use_fused_qk_norm_rope = False
        self.use_fused_wo_a = self.use_npu_arch35_mxfp8_wo_a = self.wo_a_fp8 = False
        self.n_heads, self.n_local_heads, self.head_dim = HEADS, HEADS // parallel.tp_size, WIDE
        self.qk_rope_head_dim, self.qk_nope_head_dim, self.q_lora_rank, self.o_lora_rank = ROPE, WIDE - ROPE, Q_LORA, 16
        self.n_local_groups, self.eps, self.freqs_cis, self._attn_sink_local = 1, 1e-6, torch.ones(1), None
        self.attn_sink, self.attn_mqa = torch.zeros(HEADS), SimpleNamespace(layer_id=layer_id, v_head_dim=WIDE)
        self.compressor = object() if self.reads.get(layer_id) == "compressor" else None
        self.indexer = object() if self.reads.get(layer_id) == "indexer" else None
        self.fuse_wqa_wkv = self.fused
        if self.fused:
            self.wqkv_a = projection(self.kind, Q_LORA + WIDE, 7 * layer_id)
        else:
            self.wq_a, self.wkv = (projection(self.kind, n, 7 * layer_id + n) for n in (Q_LORA, WIDE))
        self.q_norm, self.kv_norm = RMSNorm(Q_LORA), RMSNorm(WIDE)
        for norm in (self.q_norm, self.kv_norm):
            norm.weight.data = torch.ones_like(norm.weight, dtype=torch.bfloat16)
        own = slice(self.attn_tp_rank * self.n_local_heads * WIDE, (self.attn_tp_rank + 1) * self.n_local_heads * WIDE)
        self.wq_b = ReplicatedLinear(Q_LORA, self.n_local_heads * WIDE, bias=False, params_dtype=torch.bfloat16)
        self.wq_b.weight.data.copy_(small.draw(HEADS * WIDE, Q_LORA, seed=200 + layer_id, scale=0.1)[own])
        down = small.draw(O_LORA, HEADS * WIDE, seed=300 + layer_id, scale=0.2)[:, own]
        self.wo_a = SimpleNamespace(weight=down.bfloat16().contiguous())
        groups = parallel.tp_size
        self.wo_b = RowParallelLinear(groups * O_LORA, HIDDEN, bias=False, params_dtype=torch.bfloat16)
        whole = small.draw(HIDDEN, groups * O_LORA, seed=400 + layer_id).bfloat16()
        self.wo_b.weight.data.copy_(whole.chunk(groups, 1)[self.attn_tp_rank])

    @property
    def projections(self) -> list[Any]:
        return [self.wqkv_a] if self.fused else [self.wq_a, self.wkv]

    def accepts_mxfp8_swizzled_input(self):
        return False  # of a fused producer; what a linear takes is another matter

    def accepts_deepgemm_mxfp8_input(self):
        return False

    def maybe_use_decode_attn_tp(self, forward_batch):
        return contextlib.nullcontext()


calls: list[tuple[torch.Tensor, Any]] = []
"""Of each call of the release's forward: its rows, and what came as quantized."""
_released = v4.MQALayer.forward.__wrapped__


def _watched(self, x, positions, forward_batch, x_quant=None, **more):
    self.heights.append(x.shape[0])
    calls.append((x, x_quant))
    return _released(self, x, positions, forward_batch, x_quant=x_quant, **more)


# The adapter's own wrapper, around the release's own function.
Attention.forward = prefill_sp._attention(_watched)


def projection(kind: str, n: int, seed: int) -> ReplicatedLinear:
    """A ReplicatedLinear [n, HIDDEN]; kind: bf16, or what fp8 in blocks of 32 x 32 is served with: scales that are
    powers of two, fp32 scales, or the view for FlashInfer's MXFP8 kernels (whose stand-ins these are)."""
    if kind == "mxfp8":
        return split_fp8.mxfp8_layer(n, HIDDEN)
    if kind == "bf16":
        layer = ReplicatedLinear(HIDDEN, n, bias=False, params_dtype=torch.bfloat16)
        layer.weight.data.copy_(small.draw(n, HIDDEN, seed=seed, scale=0.1))
        return layer
    config = fp8.Fp8Config(is_checkpoint_fp8_serialized=True, activation_scheme="dynamic", weight_block_size=[32, 32])
    config.scale_fmt = "ue8m0" if kind == "powers" else None
    layer = ReplicatedLinear(HIDDEN, n, bias=False, params_dtype=torch.bfloat16, quant_config=config)
    layer.weight.data.copy_(small.draw(n, HIDDEN, seed=seed).clamp(-4, 4).to(torch.float8_e4m3fn))
    steps = torch.arange(layer.weight_scale_inv.numel()) % 5
    layer.weight_scale_inv.data.copy_(torch.exp2(-5.0 - steps).view_as(layer.weight_scale_inv))
    layer.quant_method.process_weights_after_loading(layer)
    return layer.requires_grad_(False)
