"""A scene of prefill_adapters_probe.py: the real candidate factory under faked compute capabilities."""

from __future__ import annotations

import sys
import types

import torch
from sglang.srt.layers.attention import deepseek_v4_backend
from sglang.srt.layers.attention.dsv4 import v41_indexer

from tests.engine.split_ranks import state_of

CACHED = ("is_sm100_or_newer", "has_dense_fp4_indexer", "_use_deep_gemm_prefill")


def on(capability: tuple[int, int], deep_gemm: bool, topk_blocks: int, factory) -> str:
    """What the factory gives, or raises, on such a machine."""
    for name in CACHED:
        getattr(v41_indexer, name).cache_clear()
    torch.cuda.get_device_capability = lambda device=None: capability
    torch.cuda.is_available = lambda: True
    torch.version.cuda = "13.0"
    v41_indexer.is_cuda = lambda: True
    fake = types.ModuleType("deep_gemm")
    fake.fp8_fp4_mqa_logits = print
    sys.modules["deep_gemm"] = fake if deep_gemm else None
    try:
        prefill, decode = factory(
            token_to_kv_pool="pool",
            req_to_token="table",
            page_size=64,
            candidate_topk_blocks=topk_blocks,
            candidate_block_size=8,
        )
    except RuntimeError as error:
        return f"RuntimeError: {error}"
    held = [prefill.token_to_kv_pool, prefill.req_to_token, prefill.topk_blocks, prefill.block_size]
    kind = type(prefill).__name__ + (" one" if prefill is decode else " two")
    return f"{kind} {held} {prefill.use_deep_gemm_prefill}"


def sm12x(rank, args):
    """Each machine: what the stock factory gives, and what the one that the attention backend holds gives."""
    # The copy that the attention backend imported by name is the one that serves.
    ours = deepseek_v4_backend.make_candidate_indexer
    out = {}
    for capability in ((9, 0), (10, 0), (11, 0), (12, 0), (12, 1)):
        for deep_gemm in (False, True):
            for topk_blocks in (0, 2048):
                key = f"{capability[0]}.{capability[1]} {'deep_gemm' if deep_gemm else 'torch'} {topk_blocks}"
                out[key] = [on(capability, deep_gemm, topk_blocks, factory) for factory in (ours.__wrapped__, ours)]
    return {"seen": out, "state": state_of("sm12x_dense_candidates").as_json()}
