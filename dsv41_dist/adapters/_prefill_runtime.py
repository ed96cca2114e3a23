"""Sequence-parallel prefill of one model: which chunks are sharded, the verdicts on their parts, and the counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..comm import RowScope, SelfCheck
from ._prefill_chunk import Chunk, GatheringList
from ._prefill_debug import Debug
from ._prefill_fp8 import Fp8Gathers
from ._prefill_gate import chunk_refusal, is_prefill

if TYPE_CHECKING:
    from ..comm import Communicator
    from ..comm.rows import RowMode
    from ..engine.state import AdapterState

__all__ = ["Options", "Prefill"]

Loop = Callable[..., tuple[torch.Tensor, torch.Tensor, Any]]


class Options(NamedTuple):
    """As the gates have it. mode: of `RowScope`. wkv: shard Engram's projection too, where it checks out. fp8: gather
    rows as fp8 where nothing reads them in bf16, and where that checks out."""

    mode: RowMode
    min_rows: int
    wkv: bool
    compare: bool = False
    fingerprints: bool = False
    debug_chunks: int | None = None
    dump: str | None = None
    fp8: bool = False

    @classmethod
    def from_gates(cls, gates: Any) -> Options:
        """Raises ValueError for gates that contradict one another."""
        debug: list[str] = gates["DSV41_PREFILL_SP_DEBUG"]
        comm, exact = gates["DSV41_PREFILL_SP"] == "comm", gates["DSV41_PREFILL_SP_EXACT"]
        if comm and gates["DSV41_PREFILL_SP_FP8"]:
            raise ValueError(
                "DSV41_PREFILL_SP=comm gathers nothing that DSV41_PREFILL_SP_FP8=1 could make fp8: set one"
            )
        if comm and exact:
            raise ValueError("DSV41_PREFILL_SP=comm swaps the all-reduce that DSV41_PREFILL_SP_EXACT=1 keeps: set one")
        if gates["DSV41_PREFILL_SP_DEBUG_DUMP"] and "compare" not in debug:
            raise ValueError("DSV41_PREFILL_SP_DEBUG_DUMP needs DSV41_PREFILL_SP_DEBUG=compare")
        if gates["DSV41_PREFILL_SP_DEBUG_CHUNKS"] and not debug:
            raise ValueError("DSV41_PREFILL_SP_DEBUG_CHUNKS needs DSV41_PREFILL_SP_DEBUG=compare or fp")
        return cls(
            mode="comm" if comm else "exact" if exact else "fast",
            min_rows=gates["DSV41_PREFILL_SP_MIN_ROWS"],
            wkv=gates["DSV41_PREFILL_SP_WKV"],
            compare="compare" in debug,
            fingerprints="fp" in debug,
            debug_chunks=gates["DSV41_PREFILL_SP_DEBUG_CHUNKS"],
            dump=gates["DSV41_PREFILL_SP_DEBUG_DUMP"],
            fp8=gates["DSV41_PREFILL_SP_FP8"],
        )


class Prefill:
    """tp_group: the engine's coordinator, whose all-reduce is the one that `exact` must have the bits of.

    defers_attention_sum: whether the release's attention can hand its partial sum over (`defer_all_reduce`).
    """

    def __init__(
        self,
        comm: Communicator,
        tp_group: Any,
        state: AdapterState,
        options: Options,
        model: Any,
        defers_attention_sum: bool,
    ) -> None:
        self.comm = comm
        self.options = options
        self.defers_attention_sum = defers_attention_sum
        self.sharded = 0
        self.stock: dict[str, int] = {}
        self.all_reduce: Callable[[torch.Tensor], torch.Tensor] = tp_group.all_reduce
        self._state = state
        self._wkv = SelfCheck(comm.agreement, "prefill_sp:wkv")
        self._note = len(state.notes)
        state.notes.append("")
        self._whole_at: dict[int, int] = {}  # layer -> sizes at which its wkv is whole
        self._engrams = {
            id(layer.engram): index for index, layer in enumerate(model.layers) if getattr(layer, "engram", None)
        }
        debugs = options.compare or options.fingerprints
        self.debug = Debug(options, comm, model, state) if debugs else None
        self.fp8 = Fp8Gathers(comm, model, state) if options.fp8 else None
        self._say()

    def run(
        self,
        stock: Loop,
        loop: Loop,
        model: Any,
        positions: torch.Tensor,
        box: list[torch.Tensor],
        rest: tuple[Any, ...],
    ) -> Any:
        """The engine's loop over the layers, on shards where this chunk can be sharded.

        stock: the loop as it is; loop: as it runs on shards (the same, or with its row counts rewritten). box: the
        only reference to the layers' input [rows, streams, hidden], which the loop frees early. rest: forward batch,
        ids, global ids, whether rows are captured for the draft, and where to.
        """
        batch, input_ids, ids_global, captures, aux = rest
        if not is_prefill(batch):
            return stock(model, positions, box.pop(), *rest)
        why = chunk_refusal(box[0], input_ids, batch, self.comm.ranks.size, self.options.min_rows)
        if why is not None:
            self.stock[why] = self.stock.get(why, 0) + 1
            self._say()
            return stock(model, positions, box.pop(), *rest)
        rows = box[0].shape[0]
        scope = RowScope(self.comm, rows, self.options.mode, all_reduce=self.all_reduce)
        chunk = Chunk(self, scope, self._has_tail(model), self._debug_of_chunk())
        self.sharded += 1
        self._say()
        self._state.fire()
        collected = GatheringList(chunk) if isinstance(aux, list) else aux
        with chunk.open():
            box.append(chunk.take(box.pop()))
            residual, pre, tail = loop(model, positions, box.pop(), batch, input_ids, ids_global, captures, collected)
            if chunk.live:
                residual, pre = chunk.gather(residual), chunk.gather(pre)
        if collected is not aux:
            aux.extend(collected)
        if chunk.debug is not None:
            chunk.debug.end_of_chunk()
        if self.fp8 is not None:
            self.fp8.say()
        return residual, pre, tail

    @staticmethod
    def _has_tail(model: Any) -> bool:
        from sglang.srt.model_executor.forward_context import get_attn_backend  # pyright: ignore[reportMissingImports]

        if model.late_layer_start is None:
            return False
        return get_attn_backend().tail_forward_metadata.late_layer_tail is not None

    def _debug_of_chunk(self) -> Debug | None:
        most = self.options.debug_chunks
        return self.debug if most is None or self.sharded < most else None

    @staticmethod
    def forward_flags() -> Any:
        from sglang.srt.runtime_context import get_forward  # pyright: ignore[reportMissingImports]

        return get_forward()

    # Engram

    @staticmethod
    def lookup(module: Any, ids: torch.Tensor, batch: Any) -> torch.Tensor:
        """The engine's own lookup of all rows: [rows, columns] -> [rows, columns, dim]."""
        if hasattr(module, "embed_rows"):
            return module.embed_rows(ids, batch, False)
        return module.embed(ids, batch, cp_all_tokens=False)

    def wkv_verdict(self, module: Any, rows: int) -> bool | None:
        """Whether this layer's projection of a shard of a chunk of `rows` gives the chunk's bytes; None: not known."""
        return self._wkv.verdict((self._engrams[id(module)], rows)) if self.options.wkv else False

    def check_wkv(self, module: Any, rows: int, whole: Any, shard: Any, table_rows: torch.Tensor) -> torch.Tensor:
        """The first chunk of a size: both ways, compared on every rank, agreed. Gives the whole form's bytes."""
        key = (self._engrams[id(module)], rows)
        out = self._wkv.run(key, whole, shard, table_rows)
        if not self._wkv.verdict(key):
            self._whole_at[key[0]] = self._whole_at.get(key[0], 0) + 1
            if self._whole_at[key[0]] == 1:  # the sizes after it are counted
                why = self._wkv.reasons[key]
                self._state.notes.append(f"layer {key[0]} engram.wkv at {rows} rows: whole on every rank, {why}")
            self._say()
        return out

    def _say(self) -> None:
        stock = ", ".join(f"{count} {why}" for why, count in self.stock.items())
        text = f"{self.sharded} chunks sharded ({self.options.mode}), {sum(self.stock.values())} stock"
        if stock:
            text += f": {stock}"
        for layer, sizes in self._whole_at.items():
            text += f"; layer {layer} engram.wkv whole at {sizes} sizes"
        self._state.notes[self._note] = text
