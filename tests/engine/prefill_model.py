"""A small V4.1 on the engine's real classes, for the prefill probe: the real layer loop, layers, boundaries,
hyper-connections, Engram, row-parallel output projection, tail and draft packer of the release. Attention's and the
experts' arithmetic is plain torch, in which every row depends on the rows before it."""

from __future__ import annotations

import contextlib
import os
from types import SimpleNamespace
from typing import Any

import sglang.kernels.ops.layernorm.mhc as kernels
import torch
from sglang.srt.distributed import tensor_model_parallel_all_reduce
from sglang.srt.layers.attention.deepseek_v4_backend import DeepseekV4AttnBackend, LateLayerTail
from sglang.srt.layers.engram import EngramLayout
from sglang.srt.layers.linear import RowParallelLinear
from sglang.srt.layers.moe.utils import should_add_replicated_moe_output, should_skip_post_experts_all_reduce
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.models import deepseek_v2
from sglang.srt.models import deepseek_v4 as v4
from sglang.srt.runtime_context import get_parallel

from dsv41_dist.adapters import prefill_sp

HIDDEN = int(os.environ.get("PREFILL_HIDDEN", "64"))  # 5120 on a GPU, whose kernels are made for the published width
STREAMS, VOCAB, LAYERS, ENGRAM_LAYER = 4, 97, 4, 1


def stand_ins() -> None:
    """What a CPU cannot run: two kernels of the hyper-connections.

    Sinkhorn in float64, rounded: the kernel works row by row, but the last bit of a CPU's exp depends on where in a
    vector a row falls.
    """

    def sinkhorn(mixes, scale, base, mult=4, iters=20, eps=1e-6):
        scale, parts = scale.double(), [mult, mult, mult * mult]
        pre, post, comb = (
            m * s + b for m, s, b in zip(mixes.double().split(parts, -1), scale, base.split(parts), strict=True)
        )
        comb = comb.unflatten(-1, (mult, mult)).softmax(-1) + eps
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
        for _ in range(iters - 1):
            comb = comb / (comb.sum(-1, keepdim=True) + eps)
            comb = comb / (comb.sum(-2, keepdim=True) + eps)
        return (pre.sigmoid() + eps).float(), (2 * post.sigmoid()).float(), comb.float()

    def combine(x_flat, pre, mult, dtype):
        streams = x_flat.view(x_flat.shape[0], mult, -1).float()
        return (pre.float().unsqueeze(-1) * streams).sum(1).to(dtype)

    kernels.hc_split_sinkhorn = sinkhorn
    setattr(kernels, "mhc_combine" if hasattr(kernels, "mhc_combine") else "hc_combine", combine)
    if hasattr(v4, "_get_mhc_ops"):
        v4._get_mhc_ops = lambda: SimpleNamespace(hc_split_sinkhorn=sinkhorn)


def draw(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    """The same normal values on every device."""
    drawn = torch.randn(*shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu") * scale
    return drawn.to(torch.get_default_device())


def _attention(self, x, positions, forward_batch, x_quant=None, defer_all_reduce=False):
    """Every row sees the mean of the rows up to it; heads are sharded, the output projection is the real one."""
    assert x.shape[0] == positions.shape[0], (x.shape, positions.shape)
    self.heights.append(x.shape[0])
    heads = x.float() @ self.query
    mixed = heads.cumsum(0) / torch.arange(1, x.shape[0] + 1).unsqueeze(1) + heads * (1 + positions.unsqueeze(1) % 3)
    if hasattr(self, "_project_wo_b"):
        return self._project_wo_b(mixed.to(x.dtype), defer_all_reduce=defer_all_reduce)
    return self.wo_b(mixed.to(x.dtype))[0]


class Attention(v4.MQALayer):
    def __init__(self, layer_id: int) -> None:
        torch.nn.Module.__init__(self)
        parallel = get_parallel()
        self.layer_id, self.attn_tp_size, self.heights = layer_id, parallel.tp_size, []
        self.query = draw(parallel.tp_size, HIDDEN, HIDDEN // parallel.tp_size, seed=layer_id, scale=0.1)[
            parallel.tp_rank
        ]
        self.wo_b = RowParallelLinear(HIDDEN, HIDDEN, bias=False, params_dtype=torch.bfloat16)
        whole = draw(HIDDEN, HIDDEN, seed=10 + layer_id, scale=0.1).bfloat16()
        self.wo_b.weight.data.copy_(whole.chunk(parallel.tp_size, 1)[parallel.tp_rank])

    # The adapter's own wrapper, around arithmetic that a CPU can run.
    forward = prefill_sp._attention(_attention)

    def accepts_mxfp8_swizzled_input(self):
        return False

    def accepts_deepgemm_mxfp8_input(self):
        return False

    def maybe_use_decode_attn_tp(self, forward_batch):
        return contextlib.nullcontext()


class Experts(torch.nn.Module):
    """The contract of DeepseekV2MoE with the engine's own rules for its sums; each row is routed by its token."""

    replicated = False

    def __init__(self, layer_id: int, **_: Any) -> None:
        super().__init__()
        parallel = get_parallel()
        self.tp_size, self.reduce_results, self.shared_experts = parallel.tp_size, True, None
        self._shared_expert_tp1, self.heights = Experts.replicated, []
        self.experts = SimpleNamespace(quant_method=None, should_fuse_routed_scaling_factor_in_topk=True)
        self.routed = draw(parallel.tp_size, 3, HIDDEN, HIDDEN, seed=20 + layer_id, scale=0.1)[parallel.tp_rank]
        rank = 0 if self._shared_expert_tp1 else parallel.tp_rank
        self.shared = draw(parallel.tp_size, HIDDEN, HIDDEN, seed=30 + layer_id, scale=0.1)[rank]

    def forward(
        self,
        x,
        forward_batch,
        input_ids=None,
        input_ids_global=None,
        skip_shared_experts=False,
        return_moe_output=False,
        leave_output_sum=False,
    ):
        assert x.shape[0] == input_ids.shape[0] == input_ids_global.shape[0]
        self.heights.append(x.shape[0])
        each = torch.einsum("th,ehd->ted", x.float(), self.routed)
        routed = each[torch.arange(x.shape[0]), input_ids_global % 3].to(x.dtype)
        shared = (x.float() @ self.shared).to(x.dtype)
        replicated = self._shared_expert_tp1
        if leave_output_sum or return_moe_output:
            return deepseek_v2.MoEOutput(routed, shared, self.experts, 1.0, replicated)
        out = routed if replicated else routed + shared
        if not should_skip_post_experts_all_reduce(is_tp_path=True):
            out = tensor_model_parallel_all_reduce(out)
        if replicated and should_add_replicated_moe_output():
            out = out + shared
        return out


class Backend(DeepseekV4AttnBackend):
    """The real tail switch; what the source layer would write is kept."""

    def __init__(self, tail: LateLayerTail | None) -> None:
        core = SimpleNamespace(low_ratios=(), request_window_layout=None)
        self.forward_metadata = SimpleNamespace(core_attn_metadata=core)
        self.tail_forward_metadata = SimpleNamespace(late_layer_tail=tail, core_attn_metadata=core)
        self.token_to_kv_pool = SimpleNamespace(request_window=None)
        self.tail_source_kv_layer_id = None
        self.source_rows: list[torch.Tensor] = []

    def forward_low_ratio_sources(self, *, x, positions, **_):
        assert x.shape[0] == positions.shape[0]
        self.source_rows.append(x.clone())


def config(image: bool = True) -> SimpleNamespace:
    return SimpleNamespace(
        hidden_size=HIDDEN,
        hc_mult=STREAMS,
        hc_sinkhorn_iters=5,
        hc_eps=1e-6,
        rms_norm_eps=1e-6,
        hc_pre_from_prev_sublayer=True,
        model_type="deepseek_v41",
        vision_n_layers=1 if image else 0,
        image_token_id=7,
        num_hidden_layers=LAYERS,
        language_model_only=False,
    )


def build(
    layer_class: type, *, replicated: bool = False, late: int | None = None, capture: tuple[int, ...] = ()
) -> Any:
    """A model of LAYERS layers with the same weights however often it is built; Engram in layer 1, image rows."""
    Experts.replicated = replicated
    hold, deepseek_v2.DeepseekV2MoE = deepseek_v2.DeepseekV2MoE, lambda **options: Experts(options["layer_id"])
    made = type("Layer", (layer_class,), {"_build_self_attn": lambda self, *, layer_id, **_: Attention(layer_id)})
    layout = EngramLayout(
        max_ngram_size=3, layer_ids=(ENGRAM_LAYER,), num_embeddings=(400,), n_heads=2, head_dim=32,
        primes=(((97, 101), (103, 99)),),
    )  # fmt: skip
    try:
        with _stack():
            layers = [made(config(), index, engram_layout=layout) for index in range(LAYERS)]
    finally:
        deepseek_v2.DeepseekV2MoE = hold
    for index, layer in enumerate(layers):
        _fill(layer, index)
        if hasattr(layer, "bind_next"):
            layer.bind_next(layers[index + 1] if index + 1 < LAYERS else None)
    model = v4.DeepseekV4Model.__new__(v4.DeepseekV4Model)
    torch.nn.Module.__init__(model)
    model.config, model.layers = config(), torch.nn.ModuleList(layers)
    model.pp_group = SimpleNamespace(world_size=1)
    model.start_layer, model.end_layer, model.late_layer_start = 0, LAYERS, late
    model.hc_pre_from_prev_sublayer, model.tail_writes_source_kv = True, True
    model.decoder_replay_tail, model.late_layer_vl_routing = None, False
    model.dspark_layers_to_capture = set(capture) or None
    model.engram_hasher = lambda ids, batch: torch.stack([(ids * k + k) % 97 for k in (3, 5, 7, 11)], 1).unsqueeze(1)
    return model.requires_grad_(False)


def _stack() -> Any:
    try:
        from sglang.srt.layers.layer_boundary import layer_stack
        from sglang.srt.models.deepseek_v4_boundary import FinalRead
    except ImportError:
        return contextlib.nullcontext()
    return layer_stack(final_read=FinalRead())


def _fill(layer: Any, index: int) -> None:
    for number, name in enumerate(("hc_attn_fn", "hc_ffn_fn", "hc_attn_base", "hc_ffn_base")):
        parameter = getattr(layer, name)
        parameter.data.copy_(draw(*parameter.shape, seed=100 * index + number, scale=0.1))
    for name in ("hc_attn_scale", "hc_ffn_scale"):
        getattr(layer, name).data.fill_(1.0)
    for norm in (layer.input_layernorm, layer.post_attention_layernorm):
        norm.weight.data = (1 + draw(HIDDEN, seed=50 + index, scale=0.1)).bfloat16()
    engram = layer.engram
    if engram is not None:
        embed = engram.embed
        rows = slice(embed.row_start, embed.row_start + embed.rows)
        embed.weight.data.copy_(draw(400, 32, seed=60)[rows].to(torch.float8_e4m3fn))
        embed.scale.data.view(torch.uint8).copy_((125 + torch.arange(400) % 4).view(400, 1)[rows])
        engram.wkv.weight.data = draw(*engram.wkv.weight.shape, seed=61, scale=0.1).bfloat16()
        for name in ("q_weight", "k_weight"):
            getattr(engram, name).data.copy_(1 + draw(STREAMS, HIDDEN, seed=62, scale=0.1))


def tail_of(rows: int, requests: int, length: int) -> LateLayerTail:
    """The last `length` rows of each of `requests` equal requests."""
    each = rows // requests
    index = torch.cat([torch.arange(each - length, each) + each * r for r in range(requests)])
    return LateLayerTail(
        token_indices=index,
        positions=index.clone(),
        extend_seq_lens=torch.full((requests,), length),
        extend_seq_lens_cpu=[length] * requests,
        swa_out_cache_loc=index.clone(),
        contiguous_start=rows - length if requests == 1 else None,
    )


def batch_of(rows: int, requests: int = 1, mode: Any = ForwardMode.EXTEND) -> SimpleNamespace:
    return SimpleNamespace(
        forward_mode=mode,
        residual_stream=None,
        input_ids=None,
        capture_hidden_mode=None,
        return_logprob=False,
        extend_seq_lens_cpu=[rows // requests] * requests,
        num_token_non_padded=None,
        global_num_token_non_padded=None,
        global_num_token_non_padded_cpu=rows,
        dp_padding_mode=None,
        attn_cp_metadata=None,
        can_run_tbo=False,
        is_extend_in_batch=True,
        engram_staged_rows=None,
        contains_mm_inputs=lambda: True,
    )
