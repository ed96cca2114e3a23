"""The table of gates: one line each, in the order of the adapters' table. Torch-free."""
# ruff: noqa: E501
# A table is read by its columns: one line a variable, however long.
# fmt: off

from __future__ import annotations

from typing import Any, NamedTuple

from .gate_kinds import Choice, Flag, Float, Int, Kind, Names, Path, VerifyCap

__all__ = ["GATES", "Gate"]


class Gate(NamedTuple):
    """One variable.

    `default` is the parsed value when the variable is unset or empty (None: decided by the owner at run time).
    `switch`: any value other than `off` turns the owning adapter on; at `auto` the adapter asks the machine.
    `volatile`: may differ between ranks, so it is not in the digest that the group agrees on.
    """

    name: str
    kind: Kind
    default: Any
    owner: str
    doc: str
    switch: bool = False
    volatile: bool = False


_F = Flag()

# In the order of the adapters' table; what belongs to no adapter comes last.
GATES: tuple[Gate, ...] = (
    Gate("DSV41_SHARED_PAD_K", _F, False, "shared_pad_k", "Pad K of the shared expert's down_proj to a width the MXFP8 kernel takes.", True),
    Gate("DSV41_INDEXER_CHUNKED", _F, False, "indexer_chunked", "Bound the indexer's transient memory by row chunks.", True),
    Gate("DSV41_INDEXER_BUDGET_MB", Int(16, 1 << 20, "MiB"), None, "indexer_chunked", "Memory budget of one row chunk; unset keeps the engine's."),
    Gate("SPARK_PREFILL_TP_SPLIT", _F, False, "spark_prefill_dense", "Split the indexer's prefill rows over the ranks.", True),
    Gate("SPARK_PREFILL_MIN_ROWS", Int(1, 1 << 20, "rows"), 256, "spark_prefill_dense", "Smallest chunk whose rows are split."),
    Gate("DSV41_SM12X_DENSE", Choice(("auto", "0", "1")), "auto", "sm12x_dense_candidates", "Dense candidate blocks where SM12x has no sparse-table kernel; auto is on there and off elsewhere.", True),
    Gate("DSV41_ENGRAM_PREFETCH", _F, False, "engram_prefetch", "Run the Engram row copies of all layers on a side stream.", True),
    Gate("DSV41_ENGRAM_PREFETCH_CHECK", _F, False, "engram_prefetch", "Run the synchronous path too and count gathers that differ."),
    Gate("DSV41_WO_A_W8", _F, False, "wo_a_w8", "Serve 2 to 8 verify/draft rows of wo_a from an exact fp8 twin.", True),
    Gate("DSV41_WO_A_W8_MID", _F, False, "wo_a_w8", "Serve 9 to 192 rows from the twin as well."),
    Gate("DSV41_WO_A_W8_DROP", _F, False, "wo_a_w8", "Drop the bf16 weight once its twin is shown bit-identical."),
    Gate("DSV41_DRAFT_TAU", Float(0.05, 4.0), 1.0, "draft_tau", "Scale the draft's sampling temperature; 1 is off.", True),
    Gate("DSV41_DRAFT_HEAD_FP8", _F, False, "draft_head_fp8", "Compute the draft's block logits from an fp8 copy of the head.", True),
    Gate("DSV41_DRAFT_HEAD_FP8_IMPL", Choice(("base", "tp4")), "base", "draft_head_fp8", "Kernel variant: 16-row tiles, or one tile sized to the batch."),
    Gate("DSV41_DRAFT_HEAD_FP8_MAX_M", Int(1, 128, "rows"), 64, "draft_head_fp8", "Rows above which the bf16 head is used."),
    Gate("DSV41_BLOCK_VERIFY", Choice(("0", "1", "native")), "0", "block_verify", "Block verification of sampled rows; native selects the engine's kernel.", True),
    Gate("DSV41_FOLDED_FENCE", _F, False, "folded_result_fence", "Clone the folded accept's results out of the verify graph's buffers.", True),
    Gate("DSV41_VERIFY_CAP", VerifyCap(), 0, "verify_cap", "Verified drafts per request: a fixed number, or a stopping rule on the draft's confidence.", True),
    Gate("DSV41_VERIFY_CAP_LOG", Path(), None, "verify_cap", "Rank 0 records confidences, live length and accepted drafts here (one sync per step).", volatile=True),
    Gate("DSV41_ROUTER_LIVE", _F, False, "router_live", "Copy the anchor row's experts inside the router kernel.", True),
    Gate("DSV41_REPLICATED_SPLIT", Names(what="layer suffixes"), [], "replicated_split", "Suffixes of replicated layers whose output columns are split over the ranks.", True),
    Gate("DSV41_REPLICATED_SPLIT_MAX_M", Int(1, 4096, "rows"), 96, "replicated_split", "Rows above which a split layer runs whole."),
    Gate("DSV41_REPLICATED_SPLIT_WINDOW", _F, True, "replicated_split", "Run every rank on a window of the widest width."),
    Gate("DSV41_SPLIT_COMPACT_GATHER", _F, False, "replicated_split", "Gather uneven columns in place instead of padded."),
    Gate("DSV41_DRAFT_MAIN_PROJ_SPLIT", _F, False, "draft_main_proj", "Split the draft's project_target_hidden over the ranks for up to 16 rows.", True),
    Gate("DSV41_ROCE_GATHER", Int(0, 1 << 30, "bytes"), 0, "roce_gather", "All-gathers whose shard fits go over the one-shot transport; 0 is off.", True),
    Gate("DSV41_ROCE_ALLREDUCE", Int(0, 1 << 30, "bytes"), 0, "roce_gather", "All-reduces up to this size go over the one-shot transport; 0 is off.", True),
    Gate("DSV41_ONESHOT", Choice(("auto", "roce", "peer", "off")), "auto", "comm", "Which one-shot transport serves small collectives."),
    Gate("DSV41_MOE_B12X_NEXT", _F, False, "moe_b12x_next", "Routed experts on b12x instead of the FlashInfer MXFP4 path.", True),
    Gate("DSV41_HC_FUSED", _F, False, "hc_fused", "Hyper-connection mix statistics in one pass over K.", True),
    Gate("DSV41_HC_FUSED_MIN", Int(1, 1 << 20, "rows"), None, "hc_fused", "Rows from which the fused pass runs; unset measures each power of two from 512 on."),
    Gate("DSV41_PREFILL_SP", Choice(("0", "1", "comm")), "0", "prefill_sp", "Sequence parallel prefill; comm swaps only the collectives.", True),
    Gate("DSV41_PREFILL_SP_EXACT", _F, False, "prefill_sp", "Keep the all-reduce, so that results are bit-identical to stock."),
    Gate("DSV41_PREFILL_SP_MIN_ROWS", Int(1, 1 << 20, "rows"), 2048, "prefill_sp", "Smallest chunk that is sharded."),
    Gate("DSV41_PREFILL_SP_WKV", _F, True, "prefill_sp", "Shard the Engram wkv projection too, where it checks out."),
    Gate("DSV41_PREFILL_SP_FP8", _F, False, "prefill_sp", "Gather attention's rows as fp8 where nothing else reads them, where it checks out."),
    Gate("DSV41_PREFILL_SP_DEBUG", Names(("compare", "fp")), [], "prefill_sp", "compare runs the stock op beside each sharded one; fp logs fingerprints."),
    Gate("DSV41_PREFILL_SP_DEBUG_CHUNKS", Int(1, 1 << 20, "chunks"), None, "prefill_sp", "Debug only the first chunks."),
    Gate("DSV41_PREFILL_SP_DEBUG_DUMP", Path(), None, "prefill_sp", "Folder for tensors that differed.", volatile=True),
    Gate("DSV41_L2_PREFETCH", _F, False, "l2_prefetch", "Prefetch the next layer's weights into L2 behind each collective.", True),
    Gate("DSV41_L2_PREFETCH_MB", Float(0.25, 256.0, "MiB"), 6.0, "l2_prefetch", "How much is prefetched per collective."),
    Gate("DSV41_AUTOTUNE_KEEP", _F, False, "autotune_keep", "Agree on the autotune cache's load decision and launch fingerprint.", True),
    Gate("DSV41_FAST_LOAD", _F, False, "fast_load", "Read this rank's checkpoint tensors eagerly with a thread pool.", True),
    Gate("DSV41_FAST_LOAD_TP_SLICE", Choice(("auto", "0", "1")), "auto", "fast_load", "Keep only the rank's slice of each expert."),
    # The communication layer reads these itself (dsv41_dist/comm/settings.py); bounds are the same there.
    Gate("DSV41_COMM_INIT_TIMEOUT_S", Float(0.1, 86400.0, "seconds"), 300.0, "comm", "Bound of every wait while a group is set up."),
    Gate("DSV41_COMM_TIMEOUT_S", Float(0.1, 86400.0, "seconds"), 100.0, "comm", "Bound of every wait afterwards."),
    Gate("DSV41_COMM_HEARTBEAT_S", Float(0.05, 60.0, "seconds"), 0.25, "comm", "How often a rank says that it lives."),
    Gate("DSV41_COMM_CHECK", _F, False, "comm", "Checked mode: ranks compare each call before its data moves."),
    Gate("DSV41_COMM_LOG", Path(), None, "comm", "Folder that receives one decision log per rank.", volatile=True),
    Gate("DSV41_PEER_MAX_MIB", Int(1, 512, "MiB"), 16, "comm", "Largest call of the peer transport, of what one rank sends."),
    Gate("DSV41_ROCE_MAX_MIB", Int(1, 64, "MiB"), 2, "comm", "Largest call over roce, in MiB of what one rank sends; sizes its memory."),
    Gate("DSV41_ROCE_ROOT", Path(), None, "comm", "Folder that stands for / when roce reads the host; {rank} is replaced.", volatile=True),
    Gate("DSV41_BOOT_TIMEOUT_S", Float(0.5, 3600.0, "seconds"), 60.0, "boot", "How long the agreement over the new TP group waits for a rank."),
    Gate("DSV41_BOOT_REPORT", Path(), None, "boot", "File that receives the boot report as JSON, written by rank 0.", volatile=True),
    Gate("DSV41_PYTHON", Path(), None, "launch", "Interpreter the launch scripts use.", volatile=True),
    Gate("DSV41_ENGINE_PYTHON", Path(), None, "tests", "Interpreter that has the real engine, for tests/engine.", volatile=True),
    Gate("DSV41_REQUIRE_ENGINE", _F, False, "tests", "Fail tests/engine instead of skipping it where no engine is found.", volatile=True),
)
