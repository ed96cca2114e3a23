"""DSV41_PREFILL_SP_DEBUG: the stock op beside each sharded one (compare), and a fingerprint of each (fp).

`compare` gathers an op's inputs, runs the engine's own function on all rows, and compares the held rows of its outputs
byte for byte with what the shard gave. It costs what stock costs and more; it is for finding where bits part.
"""

from __future__ import annotations

import inspect
import logging
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from types import FunctionType

    from ..comm import Communicator
    from ..engine.state import AdapterState
    from ._prefill_chunk import Chunk
    from ._prefill_runtime import Options

__all__ = ["Debug", "RowOp"]

_log = logging.getLogger("dsv41_dist.prefill_sp")


class RowOp:
    """An engine function on rows, made to choose its kernels by the whole chunk's rows where it gets a shard.

    args: names of the arguments that are rows, or hold them.
    """

    def __init__(self, original: FunctionType, sharded: FunctionType, args: tuple[str, ...]) -> None:
        self.name = original.__name__.lstrip("_")
        self.original = original
        self.sharded = sharded
        self.args = args
        self.signature = inspect.signature(original)


class Debug:
    """What is compared and logged, and the note that says what came of it (on every rank: gathered after a chunk)."""

    def __init__(self, options: Options, comm: Communicator, model: Any, state: AdapterState) -> None:
        self.ops = 0
        self.sums = 0
        self.chunks = 0
        self._options = options
        self._comm = comm
        self._state = state
        self._inside = False
        self._found: list[str] = []
        self._sums_differ = 0
        self._largest = 0.0
        if options.dump is not None:
            _try_folder(options.dump, comm.ranks.rank)
        self._note = len(state.notes)
        if options.compare:
            state.notes.append("compare: nothing yet")
        self._layers: dict[int, str] = {}
        for index, layer in enumerate(model.layers):
            for what in ("attn", "ffn"):
                self._layers[getattr(layer, f"hc_{what}_fn").data_ptr()] = f"layer {index} {what}"
            if getattr(layer, "engram", None):
                self._layers[id(layer.engram)] = f"layer {index}"

    def row_op(self, chunk: Chunk, op: RowOp, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The sharded function's result, compared with the stock one's."""
        if self._inside:
            return op.sharded(*args, **kwargs)
        bound = op.signature.bind(*args, **kwargs)
        where = self._where(op.name, bound.arguments)
        stock_args: dict[str, Any] = {}
        if self._options.compare:
            stock_args = {
                name: _mapped(value, chunk.gather) if name in op.args else list(value) if type(value) is list else value
                for name, value in bound.arguments.items()
            }
        self._inside = True
        try:
            out = op.sharded(*args, **kwargs)
        finally:
            self._inside = False
        if self._options.compare:
            with chunk.whole():
                want = op.original(**stock_args)
            self._compare(chunk, where, op.name, out, want)
        self._fingerprint(where, op.name, out)
        return out

    def engram(
        self,
        chunk: Chunk,
        original: Any,
        module: Any,
        x: torch.Tensor,
        ids: torch.Tensor,
        batch: Any,
        more: dict[str, Any],
    ) -> torch.Tensor:
        where = self._layers[id(module)]
        out = chunk.engram_rows(module, x, ids, batch, more)
        if self._options.compare:
            full = chunk.gather(x)
            with chunk.whole():
                want = original(module, full, ids, batch, **more)
            self._compare(chunk, where, "engram", out, want)
        self._fingerprint(where, "engram", out)
        return out

    def fp8_gather(
        self,
        chunk: Chunk,
        layer: int,
        ours: Callable[[], tuple[torch.Tensor, ...]],
        stock: Callable[[], tuple[torch.Tensor, ...]],
    ) -> None:
        """What linears make of rows gathered in fp8, beside what they make of them gathered in bf16, [rows, n] each.

        All rows are compared, not the held ones only: attention reads them all on every rank.
        """
        where, name = f"layer {layer} attn", "fp8_gather"
        with chunk.whole():
            out = ours()
            if self._options.compare:
                self._compare(chunk, where, name, out, stock(), held=False)
        self._fingerprint(where, name, out)

    def sum(self, chunk: Chunk, partial: torch.Tensor, label: str) -> torch.Tensor:
        """The held rows of a sum, compared with the engine's all-reduce; in mode exact it is that all-reduce."""
        scope = chunk.scope
        if not self._options.compare or chunk.exact:
            return scope.scatter(partial, label=label)
        out = scope.scatter(partial.clone(), label=label)
        want = scope.take(chunk.runtime.all_reduce(partial))
        self.sums += 1
        if not torch.equal(out.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8)):
            self._sums_differ += 1
            self._largest = max(self._largest, float((out.float() - want.float()).abs().max()))
        return out

    def end_of_chunk(self) -> None:
        """Collective: what every rank found so far goes into every rank's note."""
        self.chunks += 1
        if not self._options.compare:
            return
        mine = {"found": self._found, "differ": self._sums_differ, "largest": self._largest}
        everyone = self._comm.agreement.gather(mine, label="prefill_sp:compare")
        found = [f"rank {rank}: {text}" for rank, one in enumerate(everyone) for text in one["found"]]
        text = f"compare: {self.ops} ops in {self.chunks} chunks, "
        text += "; ".join(found) if found else "0 differing bytes on every rank"
        if self.sums:
            largest = max(one["largest"] for one in everyone)
            text += (
                f"; {self.sums} sums beside the all-reduce, {max(one['differ'] for one in everyone)} in another order, "
                f"largest difference {largest:g}"
            )
        self._state.notes[self._note] = text

    def _compare(self, chunk: Chunk, where: str, name: str, out: Any, want: Any, held: bool = True) -> None:
        """held: `out` is of the held rows and `want` of all; else both are of all."""
        self.ops += 1
        ours, stocks = list(_tensors(out)), list(_tensors(want))
        if held:
            stocks = [chunk.scope.take(one) for one in stocks]
        differing, total = 0, 0
        if len(ours) != len(stocks):
            self._found.append(f"{where} {name}: {len(ours)} tensors, stock has {len(stocks)}")
            return
        for ours_one, stock_one in zip(ours, stocks, strict=True):
            a, b = _bytes(ours_one), _bytes(stock_one)
            total += b.numel()
            differing += int((a != b).sum()) if a.shape == b.shape else b.numel()
        if not differing:
            return
        self._found.append(f"{where} {name}: {differing} of {total} bytes differ")
        if self._options.dump is not None:
            rank = self._comm.ranks.rank
            file = f"chunk{self.chunks}_{where}_{name}_{self.ops}_rank{rank}.pt".replace(" ", "_")
            try:
                torch.save({"sharded": ours, "stock": [t.clone() for t in stocks]}, Path(self._options.dump, file))
            except (OSError, RuntimeError) as error:  # torch's writer raises the second
                # The other ranks are on their way into the next gather: a dump is not worth leaving them there.
                self._found.append(f"DSV41_PREFILL_SP_DEBUG_DUMP={self._options.dump}: {file} not written: {error}")

    def _fingerprint(self, where: str, name: str, out: Any) -> None:
        if self._options.fingerprints:
            marks = " ".join(f"{zlib.crc32(_bytes(t).cpu().numpy().tobytes()):08x}" for t in _tensors(out))
            rank = self._comm.ranks.rank
            _log.warning("chunk %d %s %s rank %d: %s", self.chunks, where, name, rank, marks)

    def _where(self, op: str, arguments: dict[str, Any]) -> str:
        """Which layer and sublayer: by its mixing weights, or the layer whose method the op is."""
        fn = arguments.get("hc_fn")
        if fn is None and "hc" in arguments:
            fn = arguments["hc"].fn
        if fn is not None:
            return self._layers.get(fn.data_ptr(), "layer ?")
        layer: Any = arguments.get("self")
        of = ""
        if op == "hc_combine":
            of = " attn" if arguments["norm"] is layer.input_layernorm else " ffn"
        return f"layer {getattr(layer, 'layer_id', '?')}{of}"


def _try_folder(name: str, rank: int) -> None:
    """Make the folder and write into it now: a chunk is no place to find out that it cannot be."""
    from ..engine.refusal import refuse

    try:
        Path(name).mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=name) as file:
            file.write(b"0")
    except OSError as error:
        refuse(
            f"prefill_sp: DSV41_PREFILL_SP_DEBUG_DUMP={name} cannot be written on rank {rank}: {error}",
            "Name a folder that can be made and written, or unset it.",
        )


def _mapped(value: Any, make: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`value` with every tensor in it (in tuples and the engine's structs) replaced."""
    if isinstance(value, torch.Tensor):
        return make(value)
    if isinstance(value, tuple):
        parts = [_mapped(part, make) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    fields = getattr(value, "__struct_fields__", None)
    if fields is not None:
        return type(value)(*(_mapped(getattr(value, name), make) for name in fields))
    return value


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from _tensors(part)
    else:
        for name in getattr(value, "__struct_fields__", ()):
            yield from _tensors(getattr(value, name))


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.detach().contiguous().reshape(-1).view(torch.uint8)
