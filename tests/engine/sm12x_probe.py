"""Run by the engine's interpreter: the real candidate factory under faked compute capabilities. Prints JSON."""

from __future__ import annotations

import json
import sys
import types

import torch
from sglang.srt.layers.attention import deepseek_v4_backend
from sglang.srt.layers.attention.dsv4 import v41_indexer

from dsv41_dist.engine import boot

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


def main() -> None:
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    args = ServerArgs(model_path="dummy", tp_size=1, device="cpu")
    publish(args, role="test", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    # The copy that the attention backend imported by name is the one that serves.
    ours = deepseek_v4_backend.make_candidate_indexer
    stock = getattr(ours, "__wrapped__", ours)
    out = {}
    for capability in ((9, 0), (10, 0), (11, 0), (12, 0), (12, 1)):
        for deep_gemm in (False, True):
            for topk_blocks in (0, 2048):
                key = f"{capability[0]}.{capability[1]} {'deep_gemm' if deep_gemm else 'torch'} {topk_blocks}"
                out[key] = [on(capability, deep_gemm, topk_blocks, factory) for factory in (stock, ours)]
    armed = boot.armed()
    state = armed.states.get("sm12x_dense_candidates") if armed else None
    print(json.dumps({"seen": out, "wrapped": ours is not stock, "state": state.as_json() if state else None}))


main()
