"""spark_prefill_dense (SPARK_PREFILL_TP_SPLIT): the indexer's prefill rows scored once by the group, not by each rank.

Index heads are replicated, so in prefill every rank scores every row against the whole context and takes the same
top-k. Here a rank scores and selects its run of rows and the picks are gathered: 2 KiB a row instead of a pass over
the context. Divided are the full top-k, the candidate source (its blocks and its own top-k) and the dense-block
consumer, on DeepGEMM scores and on torch scores. The sparse-table consumer stays whole: its kernel schedule is made for
the row set, and it scores the published blocks only. The query projection, the index keys and the table that a sparse
source publishes are made from all rows on every rank, as before.

Guarantee: bit-identical, given kernels that treat each row by itself. The first call of each kind and size with enough
context for a choice is held against the stock selection on every rank; all ranks divide it from then on, or none.
Decode, verify, draft runners, captured graphs and the 0.5.23 prefill graph's breaks are stock.
Source: the published adapter line; the split by rows is sequence parallelism without a reduction (arXiv 2205.05198).
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from .base import Adapter, AdapterState, Guarantee, Patch, Target, after_load

if TYPE_CHECKING:
    from ._prefill_rows import Contexts, RowsOverRanks, Selection

__all__ = ["SparkPrefillDense", "attach"]

_BACKEND = "sglang.srt.layers.attention.deepseek_v4_backend"
_RUNNER = "sglang.srt.model_executor.model_runner"
_INDEXER = "sglang.srt.layers.attention.dsv4.v41_indexer"
_SCORING, _DENSE = _INDEXER + ".scoring", _INDEXER + ".dense_blocks"
_TABLE, _FULL = _INDEXER + ".sparse_table", _INDEXER + ".full_topk"

_TABLE_BLOCK = 8  # positions a block of the sparse table, which the release asserts

_rows: RowsOverRanks | None = None  # made by `attach`; one target model per process


class SparkPrefillDense(Adapter):
    name = "spark_prefill_dense"
    summary = "Split the rows of the indexer's prefill scoring and top-k over the ranks, and gather the picks."
    guarantee = Guarantee.BIT_IDENTICAL
    docs = "docs/prefill_kernels.md"
    targets = (
        Target(_RUNNER, "ModelRunner.load_model"),
        Target(_BACKEND, "DeepseekV4AttnBackend._low_ratio_index_topk"),
        Target(_SCORING, "dense_prefill_topk"),
        Target(_SCORING, "score_tiles"),
        Target(_SCORING, "_score_chunks"),
        Target(_DENSE, "_publish_prefill_blocks"),
        Target(_DENSE, "_consume_prefill_blocks"),
        Target(_DENSE, "DenseBlocksBackend._torch_publish_prefill"),
        Target(_DENSE, "DenseBlocksBackend._torch_consume_prefill"),
        Target(_FULL, "FullTopKIndexer._torch_prefill"),
        Target(_TABLE, "publish_prefill_table"),
        Target(_TABLE, "_build_prefill_table"),
        # What a slice of the rows must hold, how tiles follow from it, and what becomes of the picks.
        Target(_SCORING, "DeepGEMMPrefillData", patched=False),
        Target(_SCORING, "RequestScores", patched=False),
        Target(_SCORING, "prefill_requests", patched=False),
        Target(_SCORING, "write_prefill", patched=False),
        Target(_DENSE, "_requests_in_tile", patched=False),
        Target(_DENSE, "DenseBlocksBackend._deep_gemm_publish_prefill", patched=False),
        Target(_DENSE, "DenseBlocksBackend._deep_gemm_consume_prefill", patched=False),
        Target(_FULL, "FullTopKIndexer._deep_gemm_prefill", patched=False),
        Target(_TABLE, "SparseTableBackend.publish_prefill", patched=False),
        Target("sglang.kernels.ops.attention.dsv4.index_logits", "flat_index_logits_tiles", patched=False),
        Target("sglang.kernels.ops.attention.dsv4.candidate_blocks", "select_candidate_block_ids", patched=False),
        Target("sglang.srt.layers.logits_processor", "get_in_autotune_dummy_run", patched=False),
    )

    def install(self, patch: Patch) -> None:
        wrappers = {
            "ModelRunner.load_model": after_load(attach, patch.state),
            "DeepseekV4AttnBackend._low_ratio_index_topk": _layer,
            "dense_prefill_topk": _full_topk,
            "score_tiles": _tiles,
            "_score_chunks": _own_chunks,
            "_publish_prefill_blocks": _publish_blocks,
            "_consume_prefill_blocks": _consume_blocks,
            "DenseBlocksBackend._torch_publish_prefill": lambda original: _torch_rows(original, "torch_publish"),
            "DenseBlocksBackend._torch_consume_prefill": lambda original: _torch_rows(original, "torch_consume"),
            "FullTopKIndexer._torch_prefill": lambda original: _torch_rows(original, "torch_full_topk"),
            "publish_prefill_table": _publish_table,
            "_build_prefill_table": _build_table,
        }
        for qualname in patch.qualnames:
            patch.wrap(qualname, wrappers[qualname])


def attach(runner: Any, state: AdapterState) -> None:
    """Divide the prefill rows of this ModelRunner's indexer. Collective over its TP group."""
    global _rows
    if runner.is_draft_worker:
        return
    from ._split_group import communicator, one_rank, other_rows

    why = one_rank() or other_rows()
    if why is not None:
        state.notes.append(f"nothing is split: {why}")
        return
    from ..engine.gates import Gates
    from ._prefill_rows import RowsOverRanks

    _rows = RowsOverRanks(communicator(state), state, Gates.from_env()["SPARK_PREFILL_MIN_ROWS"])


def _layer(original: Any) -> Any:
    def _low_ratio_index_topk(
        self: Any, layer: Any, x: Any, q_lora: Any, req: Any, pos: Any, forward_batch: Any, **more: Any
    ) -> Any:
        if _rows is None:
            return original(self, layer, x, q_lora, req, pos, forward_batch, **more)
        why = _not_this_call(self, layer.indexer, x, forward_batch.forward_mode)
        if why is not None:
            _rows.stock(why)
            return original(self, layer, x, q_lora, req, pos, forward_batch, **more)
        with _rows.layer(layer.indexer.n_heads, layer.indexer.index_topk, layer.compress_ratio):
            return original(self, layer, x, q_lora, req, pos, forward_batch, **more)

    return _low_ratio_index_topk


def _not_this_call(backend: Any, indexer: Any, x: Any, mode: Any) -> str | None:
    """Why this layer's selection is stock, from facts that all ranks have in common."""
    import torch
    from sglang.srt.layers.logits_processor import (  # pyright: ignore[reportMissingImports]
        get_in_autotune_dummy_run,
    )

    if backend.is_draft_runner:
        return "draft"
    if mode.is_decode() or mode.is_target_verify() or not mode.is_extend():
        return "decode, verify or draft extend"
    if indexer.n_local_heads != indexer.n_heads:
        return "index heads are not replicated"
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        return "graph capture"
    return "autotuning" if get_in_autotune_dummy_run() else None


# ---------- DeepGEMM scores: the operands are cut ----------


def _cut(data: Any, window: slice) -> Any:
    """The operands of a window of rows. Requests keep their place and their context lengths, so that tiles are as wide
    as those of the whole chunk; one without rows in the window has none."""
    import msgspec  # pyright: ignore[reportMissingImports]

    counts: list[int] = []
    start = 0
    for rows in data.rows_per_request:
        counts.append(max(0, min(window.stop, start + rows) - max(window.start, start)))
        start += rows
    by_row = ("request_starts", "compress_lens", "q_fp4", "q_sf", "weights")
    cut = {name: getattr(data, name)[window] for name in by_row}
    return msgspec.structs.replace(data, rows_per_request=counts, **cut)


def _contexts(data: Any) -> Contexts:
    from ._prefill_rows import Contexts

    return Contexts(data.rows_per_request, data.lens_per_request)


def _full_topk(original: Any) -> Any:
    def dense_prefill_topk(data: Any, kv: Any, **how: Any) -> Any:
        out = how.get("out")  # 0.5.22 and later write into it; 0.5.21 returns the selection

        def compute(window: slice) -> Selection:
            part = _cut(data, window)
            if out is None:
                return (original(part, kv, **how),)
            picks = out.new_full((part.num_rows, out.shape[1]), -1)
            original(part, kv, out=picks)
            return (picks,)

        picked = _rows.run("full_topk", data.num_rows, compute, _contexts(data)) if _rows is not None else None
        if picked is None:
            return original(data, kv, **how)
        if out is None:
            return picked[0]
        out.copy_(picked[0])
        return None

    return dense_prefill_topk


def _publish_blocks(original: Any) -> Any:
    def _publish_prefill_blocks(*, data: Any, **rest: Any) -> Any:
        def compute(window: slice) -> Selection:
            return original(data=_cut(data, window), **rest)

        picked = None
        if _rows is not None:
            blocks = rest["topk_blocks"] * rest["block_size"]
            picked = _rows.run("publish", data.num_rows, compute, _contexts(data), blocks)
        return original(data=data, **rest) if picked is None else picked

    return _publish_prefill_blocks


def _consume_blocks(original: Any) -> Any:
    def _consume_prefill_blocks(*, data: Any, blocks: Any, **rest: Any) -> Any:
        def compute(window: slice) -> Selection:
            return (original(data=_cut(data, window), blocks=blocks[window], **rest),)

        picked = _rows.run("consume", data.num_rows, compute, _contexts(data)) if _rows is not None else None
        return original(data=data, blocks=blocks, **rest) if picked is None else picked[0]

    return _consume_prefill_blocks


class _Table(threading.local):
    """What the sparse-table source is made to do on this thread: `scored`: stop before the table and keep the blocks;
    `blocks`: score nothing and make the table from these."""

    scored: bool = False
    blocks: Any = None


_table = _Table()


def _tiles(original: Any) -> Any:
    def score_tiles(*args: Any, **kwargs: Any) -> Any:
        return iter(()) if _table.blocks is not None and not _table.scored else original(*args, **kwargs)

    return score_tiles


def _build_table(original: Any) -> Any:
    def _build_prefill_table(*, blocks: Any, **rest: Any) -> Any:
        if _table.scored:
            _table.blocks = blocks
            return None
        return original(blocks=blocks if _table.blocks is None else _table.blocks, **rest)

    return _build_prefill_table


def _publish_table(original: Any) -> Any:
    def publish_prefill_table(*, data: Any, index_page_table: Any, out_positions: Any, **rest: Any) -> Any:
        def compute(window: slice) -> Selection:
            part = _cut(data, window)
            picks = out_positions.new_full((part.num_rows, out_positions.shape[1]), -1)
            _table.scored = True
            try:
                original(data=part, index_page_table=index_page_table[window], out_positions=picks, **rest)
                return picks, _table.blocks
            finally:
                _table.scored, _table.blocks = False, None

        whole = {"data": data, "index_page_table": index_page_table, "out_positions": out_positions, **rest}
        picked = None
        if _rows is not None:
            blocks = rest["topk_blocks"] * _TABLE_BLOCK
            picked = _rows.run("publish_table", data.num_rows, compute, _contexts(data), blocks)
        if picked is None:
            return original(**whole)
        out_positions.copy_(picked[0])
        # The table's schedule is per row set: the release makes it, from all rows.
        _table.blocks = picked[1]
        try:
            return original(**whole)
        finally:
            _table.blocks = None

    return publish_prefill_table


# ---------- torch scores: each request's row chunks are cut ----------


class _Window(threading.local):
    rows: slice | None = None
    context: int = 0
    """The longest context, in compressed positions, of the requests that were scored."""


_window = _Window()


def _own_chunks(original: Any) -> Any:
    def _score_chunks(*, request: Any, **rest: Any) -> Any:
        if _window.rows is not None:
            import msgspec  # pyright: ignore[reportMissingImports]
            import torch

            _window.context = max(_window.context, request.lc)
            edges = torch.tensor([_window.rows.start, _window.rows.stop], device=request.tok.device)
            first, last = torch.searchsorted(request.tok, edges.to(request.tok.dtype)).tolist()
            cut = {"tok": request.tok[first:last], "lens": request.lens[first:last]}
            request = msgspec.structs.replace(request, **cut)
        return original(request=request, **rest)

    return _score_chunks


def _torch_rows(original: Any, kind: str) -> Any:
    def wrapper(self: Any, inputs: Any, *rest: Any, **more: Any) -> Any:
        published: Any = None
        buffers = _buffers(inputs, rest, more)
        rows = inputs.positions.shape[0]

        def compute(window: slice) -> Selection:
            nonlocal published
            _window.rows, _window.context = window, 0
            try:
                published = original(self, inputs, *rest, **more)
                context = _window.context
            finally:
                _window.rows = None
            picks = [buffer[window].clone() for buffer in buffers]
            if published is not None:
                picks.append(_as_wide(published.blocks[window], min(self.topk_blocks, -(-context // self.block_size))))
            return tuple(picks)

        picked = None
        if _rows is not None:
            from ._prefill_rows import Contexts

            positions = [tokens // inputs.compress_ratio for tokens in inputs.seq_lens_cpu or ()]
            blocks = self.topk_blocks * self.block_size if kind == "torch_publish" else 0
            picked = _rows.run(kind, rows, compute, Contexts(inputs.rows_per_request or (), positions), blocks)
        if picked is None:
            return original(self, inputs, *rest, **more)
        for buffer, picks in zip(buffers, picked, strict=False):
            buffer[:rows].copy_(picks)
        if published is None:
            return None
        import msgspec  # pyright: ignore[reportMissingImports]

        return msgspec.structs.replace(published, blocks=picked[-1])

    return wrapper


def _buffers(inputs: Any, rest: tuple[Any, ...], more: dict[str, Any]) -> list[Any]:
    """The int32 buffers [rows, topk] that a torch selection writes into: page indices and compressed positions, either
    of which may be missing. 0.5.21 hands them in as an argument."""
    out = more.get("out", rest[-1] if rest else None)
    if hasattr(inputs, "out_raw_indices"):
        found = [inputs.out_page_indices, inputs.out_raw_indices]
    else:
        assert out is not None
        found = [out.page_indices, out.raw_indices]
    return [buffer for buffer in found if buffer is not None]


def _as_wide(blocks: Any, width: int) -> Any:
    """Block ids at the width that the whole chunk's have; -1 is no block."""
    import torch

    return torch.nn.functional.pad(blocks, (0, width - blocks.shape[1]), value=-1)
