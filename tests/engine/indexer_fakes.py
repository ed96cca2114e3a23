"""Deterministic stand-ins for the indexer's GPU kernels, and batches to drive the real functions with.

A score is a hash, injective in the pool slot, of everything that belongs to the row (packed query, its scale, its
weight): a row cut from the wrong place, or one that meets the wrong keys, gets other picks. Columns past a row's
length hold garbage that differs in each call, as the real kernels leave it.
"""

from __future__ import annotations

import sys
import types
from types import SimpleNamespace

import torch

P = 1_000_003  # prime, exact in fp32
HEADS, TOPK, TOPK_BLOCKS, BLOCK, PAGE, RATIO = 32, 16, 6, 8, 64, 2
scored: list[int] = []  # rows of each scoring launch
order = {"calls": 0, "stable": True}  # a top-k whose order is not stable gives its picks rotated by the call number


def hashed(slots, q, sf, w):
    """[rows, n] fp32 of slots [rows, n] or [n] and one number each per row."""
    scale, shift = 1 + q[:, None].long() % 9973, sf[:, None].long() * 7919 + w[:, None].long() * 104729
    return ((slots.long() * scale + shift) % P).float()


def packed(numbers):
    """[rows, HEADS, 64] int8 that carry one int32 a row."""
    q = torch.zeros(len(numbers), HEADS, 64, dtype=torch.int8)
    q[:, 0, :4] = numbers.to(torch.int32).view(torch.int8).view(-1, 4)
    return q


def unpacked(q):
    return q[:, 0, :4].contiguous().view(torch.int32)[:, 0]


def garbage(shape):
    order["calls"] += 1
    return torch.rand(shape, generator=torch.Generator().manual_seed(order["calls"])) * 4 * P


def mqa_logits(q, kv, weights, starts, ends, clean, width, logits_dtype=torch.float32):
    rows = q[0].shape[0]
    scored.append(rows)
    columns = torch.arange(width)
    at = (starts[:, None].long() + columns).clamp_max(len(kv[0]) - 1)
    live = columns < (ends - starts)[:, None]
    return torch.where(live, hashed(kv[0][at], unpacked(q[0]), q[1][:, 0], weights[:, 0]), garbage((rows, width)))


def ragged_topk(logits, lens, *, out_offsets, out_indices):
    order["calls"] += 1
    k = out_indices.shape[1]
    live = torch.arange(logits.shape[1]) < lens[:, None]
    picks = logits.masked_fill(~live, -torch.inf).sort(dim=1, descending=True, stable=True).indices[:, :k]
    out_indices.fill_(-1)
    kept = torch.arange(picks.shape[1]) < lens[:, None]
    chosen = torch.where(kept, picks.int() + out_offsets[:, None], -1)
    if not order["stable"]:
        chosen = chosen.roll(order["calls"], dims=1)
    out_indices[:, : picks.shape[1]] = chosen


def block_maxima(scores, seq_lens, topk=0, *, max_seqlen=0, out=None):
    live = torch.arange(scores.shape[1]) < seq_lens[:, None]
    blocks = torch.nn.functional.pad(
        scores.float().masked_fill(~live, -torch.inf), (0, -scores.shape[1] % 8), value=-torch.inf
    )
    maxima = blocks.unflatten(1, (-1, 8)).amax(2)
    count = (seq_lens + 7) // 8
    index = torch.arange(maxima.shape[1])
    maxima = torch.where(index == (count - 1)[:, None], torch.inf, maxima)
    out.copy_(torch.nn.functional.pad(maxima, (0, out.shape[1] - maxima.shape[1]), value=-1.0))
    return out


def sorted_blocks(blocks, lens, page_table, page_size):
    last = torch.iinfo(torch.int32).max
    blocks.copy_(blocks.masked_fill(blocks < 0, last).sort(dim=1).values)
    first = blocks.masked_fill(blocks == last, 0).long() * 8
    return (page_table.long().gather(1, first // page_size) * (page_size // 8) + first % page_size // 8).int()


def schedule(blocks, lens, page_table, page_size, q_dtype, request_ids):
    """Over the whole row set: what cannot be cut. Its ids tell where each request begins."""
    parts = (blocks.long().sum(1), lens.long(), page_table.long().sum(1), request_ids.long())
    return torch.stack([part * (7 + i) for i, part in enumerate(parts)]).cumsum(1).to(torch.uint8)


def slots_of(raw, starts, slots, pages):
    """0.5.23's Triton kernel, which the interpreter runs row by row."""
    columns = (raw.long() + starts[:, None]).clamp_min(0)
    pages[: len(raw), : raw.shape[1]] = torch.where(raw >= 0, slots[columns], -1).int()


def first_of_each_block(logits, lens, blocks, out):
    out.fill_(-1)
    width = min(out.shape[1], blocks.shape[1])
    picks = blocks[:, :width]
    out[:, :width] = torch.where(picks < 1 << 20, picks * 8, -1)


class Event:
    def record(self, *stream):
        pass


class Indexer:
    """What the torch path and the operand builders read of DeepseekV41Indexer. A row's q_lora is (q, scale)."""

    n_heads = n_local_heads = HEADS
    index_topk = TOPK
    index_head_dim = 128

    def __init__(self, source: bool, consumer: bool) -> None:
        self.is_candidate_source, self.uses_candidates = source, consumer

    def queries(self, q_lora, freqs):
        return torch.nn.functional.pad(q_lora, (0, HEADS - 2))

    def head_weights(self, x):
        return x

    def scores(self, q, k, weights):
        scored.append(q.shape[0])
        return hashed(k[:, 0], q[:, 0], q[:, 1], weights[:, 0])


class Pool:
    def get_low_ratio_index_k_fp4(self, layer_id, slots):
        return slots.clone(), None

    def get_low_ratio_index_k_dequant(self, layer_id, slots):
        return slots.float()[:, None]

    def get_index_k_page_size(self, ratio):
        return PAGE

    def get_index_k_with_scale_buffer(self, layer_id):
        return torch.zeros(2, PAGE * 68, dtype=torch.uint8)


def install(indexer) -> None:
    """Put the stand-ins where the released modules look for them; `indexer` is the v41_indexer package."""
    from sglang.kernels.ops.attention import dsv4
    from sglang.kernels.ops.attention.dsv4 import candidate_blocks

    scoring, table = indexer.scoring, indexer.sparse_table
    deep_gemm = types.ModuleType("deep_gemm")
    deep_gemm.fp8_fp4_mqa_logits = mqa_logits
    sys.modules["deep_gemm"] = deep_gemm
    dsv4.topk_transform_ragged_v2 = table.topk_transform_ragged_v2 = ragged_topk
    candidate_blocks.is_arch_support_pdl = lambda: False
    if hasattr(scoring, "flat_selection_slots"):
        scoring.flat_selection_slots = slots_of
    table.amax8_varlen, table.sort_candidate_blocks = block_maxima, sorted_blocks
    table.build_sparse_indexer_schedule = schedule
    table.sparse_logits = lambda q, sf, cache, weights, plan, blocks: weights.float()
    table.topk_transform_sparse = first_of_each_block
    torch.cuda.Event, torch.cuda.Stream = Event, Event

    def operands(*, indexer, x, q_lora, freqs_cis, positions):
        return packed(q_lora[:, 0]), q_lora[:, 1:2].int().expand(-1, HEADS), x.float().expand(-1, HEADS)

    if hasattr(scoring, "_index_q_and_weights"):
        scoring._index_q_and_weights = operands
    else:  # 0.5.21
        scoring.quantize_index_q = lambda q: (packed(q[:, 0]), q[:, 1:2].int().expand(-1, HEADS))


class Batch(SimpleNamespace):
    """Requests with `rows` query rows each at the end of `lens` tokens of context."""

    def __init__(self, rows: list[int], lens: list[int]) -> None:
        positions = [torch.arange(n - r, n) for r, n in zip(rows, lens, strict=True)]
        table = torch.randperm(len(rows) * 1024, generator=torch.Generator().manual_seed(3)).view(len(rows), 1024)
        super().__init__(
            rows=rows,
            lens=lens,
            pos=torch.cat(positions),
            req=torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(rows)),
            req_to_token=table.repeat_interleave(RATIO, 1) * RATIO,
        )
        tag = self.pos * 31 + self.req * 1009
        self.q_lora = torch.stack([tag % 8191 + 1, tag % 127], 1)
        self.x = (tag % 61)[:, None]
        pages = torch.arange(len(rows))[:, None] * 16 + torch.arange(16)
        self.page_table = pages.int()[self.req]

    def tail(self, kept: int) -> Batch:
        return Batch([min(kept, r) for r in self.rows], self.lens)
