"""Puts the stand-ins where the engine will find them: before an adapter patches the same module, never over one."""

from __future__ import annotations

import functools
import os
import sys
import types
from collections.abc import Callable
from typing import Any

from ...engine.rebind import rebind
from .router import by_one_program, route_as_on_cuda

__all__ = ["ORDER_FREE", "AfterImport", "install", "order_free", "replace", "replace_experts", "replace_linear"]


class AfterImport:
    """A meta-path finder that changes a module right after it executed.

    It stands behind the adapters' import hook, which asks the finders behind it for the spec: so a stand-in is in place
    when an adapter wraps a function of the same module.
    """

    def __init__(self) -> None:
        self.changes: dict[str, Callable[[Any], None]] = {}
        self._replaced: list[tuple[Any, Any]] = []

    def add(self, name: str, change: Callable[[Any], None]) -> None:
        """Change module `name` now if it is imported, else when it will be."""
        if name in sys.modules:
            module = sys.modules[name]
            before = dict(vars(module))
            change(module)
            self._replaced += [
                (before[key], new) for key, new in vars(module).items() if before.get(key, new) is not new
            ]
        else:
            self.changes[name] = change

    def place(self) -> None:
        from ...engine.hook import Hook

        behind = [index + 1 for index, finder in enumerate(sys.meta_path) if isinstance(finder, Hook)]
        sys.meta_path.insert(max(behind, default=0), self)  # type: ignore[arg-type]
        # Modules that were imported before have copies of what was replaced: one look at all of them, which is slow.
        rebind(self._replaced)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        change = self.changes.get(fullname)
        if change is None:
            return None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:  # type: ignore[arg-type]
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, change)  # type: ignore[assignment]
                return spec
        return None


class _Loader:
    def __init__(self, loader: Any, change: Callable[[Any], None]) -> None:
        self._loader = loader
        self._change = change

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._change(module)


ORDER_FREE = "REHEARSAL_ORDER_FREE"


def order_free() -> bool:
    """Whether sums are made independent of their order, so that tensor-parallel sizes can be compared."""
    return os.environ.get(ORDER_FREE) == "1"


def replace(owner: Any, name: str, new: Any) -> None:
    """Put `new` at owner.name; it says what it replaces, which an adapter's live check follows."""
    old = getattr(owner, name)
    functools.update_wrapper(new, old)
    setattr(owner, name, new)


def install() -> None:
    """Called once in every process of the engine."""
    import torch
    from sglang.srt.runtime_context import override_platform

    global _platform
    # FlashMLA on SM120 has a torch implementation (SGLANG_SM120_FLASHMLA_BACKEND=torch): the engine's own.
    _platform = override_platform(is_sm120=True)
    _platform.install()
    # A CPU build of torch has a dummy class here, which is true.
    torch.cuda.is_current_stream_capturing = lambda: False
    # A CPU tensor has no allocator stream to be kept for.
    torch.Tensor.record_stream = _record_stream(torch.Tensor.record_stream)  # type: ignore[method-assign]
    after = AfterImport()
    after.add("sglang.kernels.jit.utils.compile.loader", _jit_loader)
    after.add("sglang.srt.arg_groups.speculative_hook", _draft_guard)
    after.add("sglang.srt.layers.rotary_embedding.factory", _rope_factory)
    after.add("sglang.srt.configs.update_config", _config_padding)
    after.add("sglang.srt.layers.quantization.fp8_utils", replace_linear)
    after.add("sglang.srt.layers.quantization.fp8", replace_experts)
    after.add("sglang.srt.layers.attention.deepseek_v4_backend", _unpinned)
    after.add("sglang.kernels.ops.speculative.cache_locs", _cache_slots)
    after.add("sglang.kernels.ops.layernorm.mhc", _mhc)
    after.add("sglang.kernels.ops.attention.flash_mla_sm120", _gather)
    after.add("sglang.kernels.ops.quantization.fp4_indexer_quant", _index_codes)
    after.add("sglang.kernels.ops.kvcache.dsv4_fp4_index_k_cache", _index_cache)
    after.add("sglang.kernels.ops.attention.dsv4.fp4_indexer", _index_logits)
    after.add("sglang.srt.layers.attention.dsv4.v41_indexer", _no_capability)
    after.add("sglang.srt.layers.moe.topk", route_as_on_cuda)
    after.add("sglang.kernels.ops.moe.moe_fused_gate", by_one_program)
    after.add("dsv41_dist.adapters._router_live_source", _live_router)
    after.add("dsv41_dist.comm.transports.peer", _loopback)
    from ..recorder import watch

    watch(after)
    after.place()


_platform: Any = None


def _record_stream(stock: Any) -> Any:
    def record_stream(self: Any, stream: Any) -> None:
        if self.device.type != "cpu":
            stock(self, stream)

    return record_stream


def _jit_loader(module: Any) -> None:
    from .jit import load_jit

    replace(module, "load_jit", load_jit)


def _config_padding(module: Any) -> None:
    def adjust_config_with_unaligned_cpu_tp(model_config: Any, *_: Any, **__: Any) -> Any:
        return model_config

    replace(module, "adjust_config_with_unaligned_cpu_tp", adjust_config_with_unaligned_cpu_tp)


def _cache_slots(module: Any) -> None:
    stock = module.assign_extend_cache_locs_func

    def assign_extend_cache_locs_func(*args: Any, **kwargs: Any) -> Any:
        # The function has a branch for each accelerator and none for this platform: CUDA's is a Triton kernel.
        before, module._is_cuda = module._is_cuda, True
        try:
            return stock(*args, **kwargs)
        finally:
            module._is_cuda = before

    replace(module, "assign_extend_cache_locs_func", assign_extend_cache_locs_func)


def _unpinned(module: Any) -> None:
    import torch

    def _move_to_device(self: Any, x: list[int]) -> Any:
        return torch.tensor(x, dtype=torch.int32, device=self.device)  # stock: by way of pinned memory

    replace(module.DeepseekV4AttnBackend, "_move_to_device", _move_to_device)


def _draft_guard(module: Any) -> None:
    handle, view = module._handle_dspark, module.resolving_view

    class OnCuda:
        """The configuration, which says that its device is CUDA: DSpark asks nothing else of the device there."""

        device = "cuda"

        def __init__(self, config: Any) -> None:
            self._config = config

        def __getattr__(self, name: str) -> Any:
            return getattr(self._config, name)

    def _handle_dspark(server_args: Any) -> Any:
        module.resolving_view = lambda args: OnCuda(view(args))
        try:
            return handle(server_args)
        finally:
            module.resolving_view = view

    replace(module, "_handle_dspark", _handle_dspark)


class UnusedRope:
    """What a layer without RoPE scaling gets for `rotary_emb`: V4.1 rotates by its own table."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotImplementedError(f"rotary_emb.{name}: the rehearsal has no rotary embedding that can be used")

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("rotary_emb(): the rehearsal has no rotary embedding that can be used")


def _rope_factory(module: Any) -> None:
    def get_rope_cpu(*_: Any, **__: Any) -> Any:
        return UnusedRope()

    replace(module, "get_rope_cpu", get_rope_cpu)


def _mhc(module: Any) -> None:
    from .formulas import mix_streams, split_sinkhorn

    def hc_split_sinkhorn(
        mixes: Any, hc_scale: Any, hc_base: Any, hc_mult: int = 4, sinkhorn_iters: int = 20, eps: float = 1e-6
    ) -> Any:
        return split_sinkhorn(mixes, hc_scale, hc_base, hc_mult, sinkhorn_iters, eps)

    def mhc_combine(x_flat: Any, pre: Any, hc: int, out_dtype: Any) -> Any:
        return mix_streams(x_flat, pre, hc).to(out_dtype)

    replace(module, "hc_split_sinkhorn", hc_split_sinkhorn)
    # 0.5.21 and 0.5.22 have it under another name.
    replace(module, "mhc_combine" if hasattr(module, "mhc_combine") else "hc_combine", mhc_combine)


def _no_capability(module: Any) -> None:
    if "is_cuda" in vars(module):
        return

    def is_sm100_or_newer() -> bool:
        return False  # 0.5.21 asks torch for the GPU's; later releases answer so where the platform is not CUDA

    replace(module, "is_sm100_or_newer", is_sm100_or_newer)


def _gather(module: Any) -> None:
    stock = module._gather_and_dequant

    def _gather_and_dequant(k_cache: Any, indices: Any, page_size: int) -> Any:
        # Rows of a prefill share most of their keys: each key is decoded once, by the engine's own code.
        keys, where = indices.unique(return_inverse=True)
        return stock(k_cache, keys, page_size)[where]

    replace(module, "_gather_and_dequant", _gather_and_dequant)


def _index_codes(module: Any) -> None:
    from .formulas import index_key_codes

    stock = module.quantize_fp4_indexer_tensor

    def quantize_fp4_indexer_tensor(x: Any, rne: bool = False) -> Any:
        return index_key_codes(x.reshape(-1, x.shape[-1])) if rne else stock(x, rne)

    replace(module, "quantize_fp4_indexer_tensor", quantize_fp4_indexer_tensor)


def _index_cache(module: Any) -> None:
    from .formulas import pack_index_keys

    def store_fp4_index_k_cache(input: Any, cache: Any, loc: Any, *, page_size: int, rne: bool = False) -> None:
        codes, scales = module.quantize_fp4_indexer_tensor(input.contiguous(), rne=rne)
        pack_index_keys(codes, scales, cache, loc, page_size)

    replace(module, "store_fp4_index_k_cache", store_fp4_index_k_cache)


def _index_logits(module: Any) -> None:
    import torch

    from .formulas import index_logits

    def fp4_index_logits_decode(q: Any, weights: Any, slots: Any, lens: Any, table: Any, page_size: int) -> Any:
        return index_logits(q, weights.to(torch.bfloat16), slots, lens, table, page_size)

    replace(module, "fp4_index_logits_decode", fp4_index_logits_decode)
    if "store_fp4_index_k_cache" in vars(module):  # 0.5.21 and 0.5.22: 0.5.23 has modules of their own for these
        _index_codes(module)
        _index_cache(module)


def _live_router(module: Any) -> None:
    """The adapter's kernel is made of the engine's, and is launched alike."""
    load = module.load

    def loaded(source: str) -> Any:
        made = load(source)
        by_one_program(made)
        return made

    module.load = loaded


def _loopback(module: Any) -> None:
    from .loopback import LoopbackTransport

    module.PeerTransport = LoopbackTransport


def replace_linear(module: Any) -> None:
    from ..formats import decode_block_fp8, encode_row_fp8
    from .formulas import block_fp8_linear

    def triton_w8a8_block_fp8_linear(
        input: Any,
        weight: Any,
        block_size: Any,
        weight_scale: Any,
        input_scale: Any = None,
        bias: Any = None,
        act_scale_ue8m0: bool = False,
        weight_bf16: Any = None,
    ) -> Any:
        if list(block_size) != [32, 32] or not act_scale_ue8m0:
            raise NotImplementedError(
                f"block-fp8 stand-in: {block_size=}, {act_scale_ue8m0=}; allowed is [32, 32], True"
            )
        decoded = getattr(weight, "_rehearsal_decoded", None)
        if decoded is None:
            decoded = decode_block_fp8(weight.data, weight_scale.data)
            if hasattr(weight, "weight_loader"):  # a parameter, which lives as long as the model
                weight._rehearsal_decoded = decoded
        out = block_fp8_linear(input, weight, weight_scale, block_size[1], decoded, order_free(), input_scale)
        return out if bias is None else out + bias

    def sglang_per_token_group_quant_fp8(x: Any, group_size: int, *, scale_ue8m0: bool = False) -> Any:
        if group_size != 32 or not scale_ue8m0:
            raise NotImplementedError(f"row quantizer: {group_size=}, {scale_ue8m0=}; allowed is 32, True")
        codes, scales = encode_row_fp8(x)
        return codes, scales.float()

    replace(module, "triton_w8a8_block_fp8_linear", triton_w8a8_block_fp8_linear)
    replace(module, "sglang_per_token_group_quant_fp8", sglang_per_token_group_quant_fp8)


def replace_experts(module: Any) -> None:
    from ..formats import decode_mxfp4
    from .formulas import expert_mlp

    method = module.Fp8MoEMethod
    load, apply, create = method.process_weights_after_loading, method.apply, method.create_moe_runner

    def process_weights_after_loading(self: Any, layer: Any) -> None:
        if not self.is_fp4_expert:
            load(self, layer)
            return
        layer._rehearsal_w13 = decode_mxfp4(layer.w13_weight.data, layer.w13_weight_scale_inv.data)
        layer._rehearsal_w2 = decode_mxfp4(layer.w2_weight.data, layer.w2_weight_scale_inv.data)

    def create_moe_runner(self: Any, layer: Any, moe_runner_config: Any) -> None:
        create(self, layer, moe_runner_config)
        config = moe_runner_config
        if self.is_fp4_expert and (config.activation != "silu" or config.apply_router_weight_on_input):
            raise NotImplementedError(f"expert stand-in: activation={config.activation}; allowed is silu")

    def apply_(self: Any, layer: Any, dispatch_output: Any) -> Any:
        if not self.is_fp4_expert:
            return apply(self, layer, dispatch_output)
        from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

        weights, ids, _ = dispatch_output.topk_output
        # The routed scaling factor is the runner's on CUDA, and the model code's where the platform is not CUDA.
        scale = self.moe_runner_config.routed_scaling_factor if dispatch_output.hidden_states.is_cuda else None
        out = expert_mlp(
            dispatch_output.hidden_states,
            layer._rehearsal_w13,
            layer._rehearsal_w2,
            weights,
            ids,
            self.moe_runner_config.swiglu_limit,
            order_free(),
            1.0 if scale is None else scale,
            static=dispatch_output.hidden_states.is_cuda,
        )
        return StandardCombineInput(hidden_states=out)

    for name, new in (
        ("process_weights_after_loading", process_weights_after_loading),
        ("create_moe_runner", create_moe_runner),
        ("apply", apply_),
    ):
        replace(method, name, new)
