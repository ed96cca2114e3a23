"""One prefill chunk whose rows are sharded: what happens at each cross-row operator and at each seam.

While a chunk is open on this thread, the engine's own loop and layers run on this rank's rows. Attention and MoE get
gathered rows and give back the held rows of their sum; Engram looks up and projects the held rows; what reads chosen
rows of the whole chunk (the late layers' tail) gets those from their owners; what captures all rows gets them gathered.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ..engine.logical_rows import sharded_rows, whole_rows
from ._prefill_fp8 import COMPRESSOR, ROUTER

if TYPE_CHECKING:
    from ..comm import RowScope
    from ._prefill_debug import Debug
    from ._prefill_runtime import Prefill

__all__ = ["Chunk", "GatheringList", "active", "current", "own_rows"]

_ATTN, _MOE, _ENGRAM, _TAIL, _AUX = (f"prefill_sp:{what}" for what in ("attn", "moe", "engram", "tail", "aux"))


class _Now(threading.local):
    chunk: Chunk | None = None


_now = _Now()


def current() -> Chunk | None:
    """The chunk that is open on this thread, also after its rows have become whole again."""
    return _now.chunk


def active() -> Chunk | None:
    """The open chunk while the engine's row-local code sees shards (or, in mode comm, while its sums are swapped)."""
    chunk = _now.chunk
    return chunk if chunk is not None and chunk.live else None


def own_rows(x: torch.Tensor) -> torch.Tensor:
    """The held rows of x [rows, ...], where shards are; else x."""
    chunk = active()
    return x if chunk is None else chunk.scope.take(x)


class Chunk:
    """scope: the rows. tail: whether the late layers run on chosen rows only (the engine's bounded replay)."""

    def __init__(self, runtime: Prefill, scope: RowScope, tail: bool, debug: Debug | None) -> None:
        self.runtime = runtime
        self.scope = scope
        self.tail = tail
        self.debug = debug
        self.live = False
        self._tail_done = False
        self._shards = ExitStack()

    @property
    def exact(self) -> bool:
        return self.scope.mode == "exact"

    @contextmanager
    def open(self) -> Generator[None]:
        """The engine's loop over the layers runs inside."""
        if _now.chunk is not None:
            raise RuntimeError("prefill_sp: a chunk is open on this thread already")
        with self._shards:
            if self.scope.sharded:
                self._shards.enter_context(sharded_rows(self.scope.held, self.scope.rows))
            _now.chunk, self.live = self, True
            try:
                yield
            finally:
                _now.chunk, self.live = None, False

    def leave(self) -> None:
        """From here on the layers run on chosen whole rows: nothing is a shard any more but the state at hand."""
        self.live = False
        self._shards.close()

    @contextmanager
    def whole(self) -> Generator[None]:
        """Inside an operator that takes gathered rows."""
        live, self.live = self.live, False
        try:
            with whole_rows():
                yield
        finally:
            self.live = live

    def gather(self, held: torch.Tensor, label: str = "prefill_sp") -> torch.Tensor:
        return self.scope.gather(held, label=label)

    def gather_bf16(self, held: torch.Tensor, label: str, reason: str) -> torch.Tensor:
        """`gather` of normed rows that something reads as they are: not as fp8, for that reason."""
        if self.runtime.fp8 is not None and self.scope.sharded:
            self.runtime.fp8.in_bf16_for(reason)
        return self.gather(held, label)

    def take(self, full: torch.Tensor) -> torch.Tensor:
        """The held rows, without keeping the others alive."""
        mine = self.scope.take(full)
        return mine.clone(memory_format=torch.contiguous_format) if self.scope.sharded else mine

    def scatter(self, partial: torch.Tensor, label: str) -> torch.Tensor:
        debug = self.debug
        if debug is not None:
            return debug.sum(self, partial, label)
        return self.scope.scatter(partial, label=label)

    # Cross-row operators

    def attention(self, original: Callable[..., Any], module: Any, options: dict[str, Any]) -> torch.Tensor:
        """MQALayer.forward on gathered rows. options: its keyword arguments; x [held, hidden] -> [held, hidden]."""
        scope = self.scope
        if scope.sharded and options.get("x_quant") is not None:
            raise RuntimeError("prefill_sp: attention was handed a quantized shard, whose scales cannot be gathered")
        fp8 = self.runtime.fp8
        if fp8 is not None and scope.sharded:
            rows, pair = fp8.rows(self, module, options["x"])
            options = {**options, "x": rows, "x_quant": pair}
        else:
            options = {**options, "x": scope.gather(options["x"], label=_ATTN)}
        defers = self.runtime.defers_attention_sum
        with self.whole(), ExitStack() as scopes:
            if not self.exact:
                # The sum is left to us: by the engine's own hand-over, or by the flag its row-parallel linear honours.
                if defers:
                    options["defer_all_reduce"] = True
                else:
                    scopes.enter_context(self.runtime.forward_flags().scoped(mlp_reduce_scatter=True))
            out = original(module, **options)
        partial = getattr(out, "partial", None)
        if partial is None:
            if self.exact:
                return self.take(out)
            if defers:
                raise RuntimeError("prefill_sp: attention summed its output although it was told not to")
            partial = out
        return self.scatter(partial, _ATTN)

    def moe(self, original: Callable[..., Any], layer: Any, x: torch.Tensor, batch: Any, ids: dict[str, Any]) -> Any:
        """_run_moe_ffn_dp_sync on gathered rows, [held, hidden] -> [held, hidden]. ids: its two id arguments."""
        full = self.gather_bf16(x, _MOE, ROUTER)
        with self.whole():
            if self.exact:
                return self.take(original(layer, full, batch, **ids))
            with self.runtime.forward_flags().scoped(mlp_reduce_scatter=True):
                partial = layer.mlp(full, batch, **ids)
        return self.scatter(partial, _MOE)

    def moe_finish(self, finalize: Any) -> torch.Tensor:
        """The held rows of a MoeFinalize: routed and shared parts merged and summed, a replicated part added once."""
        if self.exact:
            return self.take(finalize.complete())
        return self.scatter(finalize.complete(reduce=False), _MOE)

    def engram(
        self,
        original: Callable[..., Any],
        module: Any,
        x: torch.Tensor,
        ids: torch.Tensor,
        batch: Any,
        more: dict[str, Any],
    ) -> torch.Tensor:
        """Engram.forward on the held rows: x [held, streams, hidden], ids [rows, columns] of the whole chunk."""
        if not self.scope.sharded:
            return original(module, x, ids, batch, **more)
        if self.debug is not None:
            return self.debug.engram(self, original, module, x, ids, batch, more)
        return self.engram_rows(module, x, ids, batch, more)

    def engram_rows(
        self, module: Any, x: torch.Tensor, ids: torch.Tensor, batch: Any, more: dict[str, Any]
    ) -> torch.Tensor:
        from sglang.srt.layers.engram import engram_gate  # pyright: ignore[reportMissingImports]

        image: tuple[Any, ...] = ()
        if "input_ids" in more:
            seen = None if module.image_token_id is None else self.scope.take(more["input_ids"])
            image = (seen, module.image_token_id)
        kv = self._project(module, ids, batch)
        return engram_gate(x, kv, module.q_weight, module.k_weight, module.eps, module.clamp_value, *image)

    def _project(self, module: Any, ids: torch.Tensor, batch: Any) -> torch.Tensor:
        """wkv of the held rows: on the held rows where that gives the bytes of the whole chunk's, else of the whole."""

        def whole(rows: torch.Tensor) -> torch.Tensor:
            with whole_rows():
                return self.take(module.wkv(rows.flatten(-2))[0])

        def shard(rows: torch.Tensor) -> torch.Tensor:
            return module.wkv(self.take(rows).flatten(-2))[0]

        runtime = self.runtime
        verdict = runtime.wkv_verdict(module, self.scope.rows)
        if verdict:
            return module.wkv(self._lookup(module, ids, batch).flatten(-2))[0]
        rows = runtime.lookup(module, ids, batch)
        if verdict is None:
            return runtime.check_wkv(module, self.scope.rows, whole, shard, rows)
        return whole(rows)

    def _lookup(self, module: Any, ids: torch.Tensor, batch: Any) -> torch.Tensor:
        """Table rows of the held rows, [held, columns, dim]."""
        embed = module.embed
        if getattr(batch, "engram_staged_rows", None) is not None:
            return self.take(self.runtime.lookup(module, ids, batch))
        if getattr(embed, "peer", None) is not None or embed._shared:
            return embed(self.scope.take(ids), batch)
        # Exactly one rank owns a table row and the others hold zeros, so that any order of the sum gives its bytes.
        return self.runtime.comm.reduce_scatter(embed._owned_rows(ids), label=_ENGRAM)

    # Seams

    def tail_source(self, x: torch.Tensor) -> torch.Tensor:
        """All normed rows for the compressor of the tail's source layer."""
        return self.gather_bf16(x, _TAIL, COMPRESSOR)

    def tail_rows(self, original: Callable[..., Any], tail: Any, t: torch.Tensor) -> torch.Tensor:
        """LateLayerTail.rows, where t may be a shard: the chosen rows from their owners."""
        scope = self.scope
        if not scope.sharded or self._tail_done or t.shape[0] != scope.held:
            return original(tail, t)
        if tail.pad_rows:
            raise RuntimeError("prefill_sp: a padded tail belongs to context parallelism, which is not sharded here")
        index = tail.token_indices
        if tail.contiguous_start is not None:
            index = torch.arange(tail.contiguous_start, scope.rows, device=t.device)
        return scope.select(t, index, label=_TAIL)

    def tail_done(self) -> None:
        """A late layer runs: its rows are whole, of whatever number."""
        self._tail_done = True

    @property
    def captures_shards(self) -> bool:
        """Whether what the draft's capture reads is a shard: with a tail, it has chosen its rows already."""
        return self.live and self.scope.sharded and not self.tail

    def slot(self, original: Callable[..., Any], packer: Any, like: torch.Tensor) -> torch.Tensor:
        """AuxHiddenStatePacker.slot for all rows of the chunk, though `like` has the held ones."""
        if self.captures_shards:
            like = like[:1].expand(self.scope.rows, *like.shape[1:])
        return original(packer, like)

    def stream_mean(self, original: Callable[..., Any], x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        """mhc_stream_mean of a shard into a slot for all rows."""
        if not self.captures_shards or out is None:
            return original(x) if out is None else original(x, out=out)
        return out.copy_(self.scope.gather(original(x), label=_AUX))


class GatheringList(list[torch.Tensor]):
    """What 0.5.21 and 0.5.22 append captured rows to: all rows of the chunk, though the loop has the held ones."""

    def __init__(self, chunk: Chunk) -> None:
        super().__init__()
        self._chunk = chunk

    def append(self, object: torch.Tensor) -> None:
        chunk = self._chunk
        super().append(chunk.scope.gather(object, label=_AUX) if chunk.captures_shards else object)
