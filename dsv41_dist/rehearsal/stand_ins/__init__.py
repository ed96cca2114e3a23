"""What stands in for code that only a GPU can run. The list below is data, and is printed with every report.

Loaded by the engine itself in each of its processes, through its entry point group `sglang.srt.plugins` (site.py writes
the metadata). A failure here ends the process: the engine would swallow an ordinary exception and run without.
"""

from __future__ import annotations

import os
import sys
import traceback
from dataclasses import dataclass

__all__ = ["ON_GPU", "STAND_INS", "StandIn", "register"]


@dataclass(frozen=True)
class StandIn:
    """`real` is what the engine would run on its GPUs, `instead` what runs here, `checked` by what it is compared."""

    name: str
    real: str
    instead: str
    checked: str


STAND_INS = (
    StandIn(
        "block_fp8_linear",
        "fp8_utils.triton_w8a8_block_fp8_linear (Triton; the interpreter cannot tune it) and its row quantizer (CUDA)",
        "activations to e4m3 with ue8m0 scales per 32, product in fp32",
        "the engine's Triton quantiser and GEMM in the interpreter",
    ),
    StandIn(
        "mxfp4_experts",
        "fp8.Fp8MoEMethod with MXFP4 experts (FlashInfer, DeepGEMM or Marlin)",
        "weights dequantised to fp32 after the engine's loader, one product per expert, clamped SwiGLU",
        "a row-by-row formula, and the engine's DSV4_DEQUANT_FP4_TABLE",
    ),
    StandIn(
        "jit:fused_rope",
        "kernels dpsk_v4_fused_rope (CUDA)",
        "complex rotation in fp32",
        "the engine's rope_tail",
    ),
    StandIn(
        "jit:main_k_norm_rope_flashmla",
        "kernel dpsk_v4_main_k_norm_rope_flashmla (CUDA)",
        "RMS norm, rotation, 448 x e4m3 + 64 x bf16 page rows",
        "the engine's rope_tail and its page reader dequantize_k_cache_paged",
    ),
    StandIn(
        "jit:store_flashmla",
        "kernel dpsk_v4_store_flashmla (CUDA)",
        "448 x e4m3 + 64 x bf16 page rows",
        "the engine's page reader dequantize_k_cache_paged",
    ),
    StandIn(
        "jit:silu_and_mul_clamp",
        "kernel dpsk_v4_silu_and_mul_clamp (CUDA)",
        "silu(min(gate, limit)) * clip(up, limit)",
        "a scalar formula",
    ),
    StandIn(
        "hyper_connections",
        "mhc.hc_split_sinkhorn (TileLang) and mhc.mhc_combine (Triton, one program a row)",
        "the same steps over all rows in torch, fp32",
        "the engine's Triton ports in the interpreter",
    ),
    StandIn(
        "index_keys",
        "quantize_fp4_indexer_tensor and store_fp4_index_k_cache (Triton, one program a row)",
        "the same codes over all rows in torch",
        "the engine's Triton kernels in the interpreter, byte for byte",
    ),
    StandIn(
        "index_logits",
        "fp4_index_logits_decode (Triton, whose interpreter takes the bits of bf16 in a dot for integers)",
        "the same steps over all rows in torch, each key decoded once",
        "the engine's torch version of the same scores (DeepseekV41Indexer.scores), byte for byte",
    ),
    StandIn(
        "router",
        "moe_fused_gate's Triton kernel with libdevice's log1p, four rows a program",
        "the same kernel in the interpreter, one program over all rows, log1p by Triton's log",
        "the engine's torch route of the same scores: ids equal, weights to 1e-6",
    ),
    StandIn(
        "gather_once",
        "flash_mla_sm120._gather_and_dequant, which decodes a key for every row that reads it",
        "the same function on each key once",
        "the engine's function, byte for byte",
    ),
    StandIn(
        "loopback",
        "the one-shot transport `peer`: CUDA kernels over GPU peer memory",
        "the same collectives over memory that the processes share",
        "comm.reference, byte for byte, between processes",
    ),
    StandIn(
        "platform",
        "the real GPU architecture",
        "is_sm120 is said, so that FlashMLA is the engine's own torch implementation",
        "not compared: a routing decision",
    ),
    StandIn(
        "draft_guard",
        "_handle_dspark's check that the device is CUDA, NPU or XPU",
        "the check is passed; everything behind it is the engine's",
        "not compared: a routing decision",
    ),
    StandIn(
        "accelerator_memory",
        "pinned memory, record_stream, is_current_stream_capturing; the branch of assign_extend_cache_locs for CUDA",
        "plain memory, nothing, False; that branch's Triton kernel in the interpreter",
        "not compared: no arithmetic",
    ),
    StandIn(
        "config_padding",
        "nothing (a CPU-only step that pads head counts)",
        "left out: it breaks num_key_value_heads == 1",
        "not compared: a CPU-only step",
    ),
    StandIn(
        "unused_rope",
        "rotary_embedding.get_rope_cpu for layers without scaling (asserts)",
        "an object that raises when it is used; V4.1 rotates by freqs_cis",
        "that it raises",
    ),
    StandIn("import:torchvision", "torchvision", "an empty package; calls raise", "that it raises"),
    StandIn("import:soundfile", "soundfile (the HTTP server only)", "an empty module", "not compared: no audio here"),
)

# On GPUs, each only where the package that has the real one does not load.
ON_GPU = (
    StandIn(
        "sgl_kernel",
        "sgl_kernel's rmsnorm, fused_add_rmsnorm, silu_and_mul, weak_ref_tensor (CUDA)",
        "Triton norms of one program a row, silu in torch, a strong reference; any other function of it raises",
        "torch in fp64, to 1e-5 in fp32, and each row alone",
    ),
    StandIn(
        "mxfp4_experts",
        "FlashInfer, DeepGEMM or Marlin experts",
        "weights dequantised to fp32 after the engine's loader, every expert on every row, clamped SwiGLU",
        "the same stand-in's other form on a CPU, which has a row-by-row formula beside it",
    ),
    StandIn(
        "head_padding",
        "at TP1: nothing; the published model has the 64 query heads that FlashMLA takes, the tiny one four",
        "query heads and sinks are padded with zeros, as the engine does at TP2 and more",
        "not compared: the added heads are cut off again",
    ),
    StandIn(
        "deep_select",
        "deep_select.topk_page_transform (CUTLASS, whose headers come with FlashInfer or DeepGEMM)",
        "the engine's own top-k v2, which it takes where this one is not supported",
        "not compared: a routing decision",
    ),
    StandIn("sinkhorn", "mhc.hc_split_sinkhorn (TileLang)", "the engine's own Triton port of it", "not compared"),
    StandIn(
        "block_fp8_linear",
        "fp8_utils.triton_w8a8_block_fp8_linear (Triton), with --order-free only",
        "activations to e4m3 with ue8m0 scales per 32, product in fp32",
        "on a CPU: the engine's Triton quantiser and GEMM in the interpreter",
    ),
)


def register() -> None:
    """The entry point: install every stand-in in this process, or end it."""
    try:
        from . import install as on_cpu
        from . import on_gpu

        (on_gpu if os.environ.get(on_gpu.DEVICE) == "cuda" else on_cpu).install()
    except BaseException as error:
        traceback.print_exc()
        print(f"rehearsal: stand-ins cannot be installed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        raise SystemExit(3) from error
