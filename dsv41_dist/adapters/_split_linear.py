"""One replicated linear layer whose output columns are computed on all ranks and gathered: the runtime of
replicated_split.

Every rank runs the layer's own quantized linear on its run of whole 128-column tiles (14 tiles over 4 ranks: 4/4/3/3)
and the columns are gathered. A row count is served so only after SelfCheck has seen the stock layer's bytes, on the
real input and three random ones, on every rank; until then, and in a graph capture, the layer is stock.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..comm import Call, SelfCheck, Split, TileSplit
from ..engine.logical_rows import logical_rows
from . import _split_layout as layout

if TYPE_CHECKING:
    from ..comm import Communicator
    from ..engine.state import AdapterState

__all__ = ["Checks", "SplitLayer", "SplitOptions"]

_PROBES = 3
_Stock = Callable[[Any, Any], tuple[torch.Tensor, Any]]


class SplitOptions(NamedTuple):
    """max_rows: rows above which the layer runs whole. window: ranks with fewer tiles compute the widest width too, so
    that every rank runs the same shape. compact: gather uneven columns in place where that checks out. stock_only:
    says that a forward must leave no trace of its own (the engine's autotuning run)."""

    max_rows: int
    window: bool
    compact: bool
    stock_only: Callable[[], bool]


class Checks:
    """The verdicts of all layers of a group, and the reasons of those that failed, with the ranks that saw them."""

    def __init__(self, comm: Communicator, state: AdapterState) -> None:
        self.comm = comm
        self.state = state
        self._checks = {
            name: SelfCheck(comm.agreement, f"replicated_split:{name}") for name in ("columns", "gather", "compact")
        }
        self._said: set[tuple[str, str]] = set()
        self._prepared: set[Hashable] = set()
        self._guarded = any(transport.needs_prepare for transport in comm.transports.values())

    def passes(
        self,
        what: str,
        layer: str,
        key: Hashable,
        stock: Callable[[Any], Any],
        fast: Callable[[Any], Any],
        x: Any,
        probes: Sequence[Any] = (),
    ) -> bool:
        """Whether `fast` gave the bytes of `stock` on every rank. Collective. The first failure of a layer is noted."""
        check = self._checks[what]
        if check.verdict((layer, key)) is None:
            check.run((layer, key), stock, fast, x, probes=[(probe,) for probe in probes])
        if check.verdict((layer, key)):
            return True
        if (what, layer) not in self._said:
            self._said.add((what, layer))
            kept = "padded gather" if what == "compact" else "stock"
            self.state.notes.append(f"{layer} at {key}: {kept}, {check.reasons[layer, key]}")
        return False

    def prepare(self, op: str, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, split: Split | None) -> None:
        """Declare a gather before it may be captured, once for each call; collective, where a transport needs it."""
        key = (op, tuple(shapes), dtype, split)
        if self._guarded and key not in self._prepared:
            calls = [Call(op, shape, dtype, len(shape) - 1, split=split) for shape in dict.fromkeys(shapes)]
            self.comm.prepare(calls, label="replicated_split:prepare")
            self._prepared.add(key)


class SplitLayer:
    """A layer's split. `forward` stands before ReplicatedLinear.forward; the layer itself is left as it is.

    Raises CannotSlice when the weight's layout is not one that can be cut.
    """

    def __init__(self, name: str, module: Any, split: TileSplit, checks: Checks, options: SplitOptions) -> None:
        self.name = name
        self.split = split
        self._module = module
        self._checks = checks
        self._options = options
        self._rank = checks.comm.ranks.rank
        self._generation = 0
        self._variants: dict[Hashable, str] = {}  # (input kind, rows) -> stock, padded or compact
        first, offset = split.window(self._rank) if options.window else (split.start(self._rank), 0)
        self._first, self._offset = first, offset
        self._width = split.widest if options.window else split.size(self._rank)
        self._cut()

    def __deepcopy__(self, memo: Any) -> None:
        """A copied layer is a stock layer."""

    @property
    def weight_bytes(self) -> tuple[int, int]:
        """What a step streams of this layer's weight on this rank: (stock, split), in bytes."""
        # Of several scales the kernel reads one, the last named; the bf16 copy is for more rows than a step has.
        names = {"weight", [n for n in self.kind.rows_per if not n.startswith("_")][-1]}
        whole, part = (sum(getattr(of, name).nbytes for name in names) for of in (self._module, self._part))
        return whole, part

    def forward(self, stock: _Stock, x: Any) -> tuple[torch.Tensor, Any]:
        """As ReplicatedLinear.forward: (output [rows, n], bias of a skipped addition or None).

        stock: ReplicatedLinear.forward as a function of (layer, x). x: [rows, k], or a pre-quantized tuple of which
        the first is [rows, k].
        """
        data = x[0] if isinstance(x, tuple) else x
        rows = data.shape[0] if data.dim() == 2 else 0
        if not 0 < rows <= self._options.max_rows or torch.compiler.is_compiling() or self._options.stock_only():
            return stock(self._module, x)
        if logical_rows(rows) != rows:  # prefill_sp: every rank holds other rows, whose columns do not belong together
            return stock(self._module, x)
        if self._pointers != _pointers(self._module, self.kind):
            self._recut()
        key = (_kind(x), rows)
        variant = self._variants.get(key)
        if variant is None:
            if data.is_cuda and torch.cuda.is_current_stream_capturing():
                return stock(self._module, x)
            return self._decide(stock, key, x)
        if variant == "stock":
            return stock(self._module, x)
        self._checks.state.fire()
        return self._gathered(self._columns(x), variant), self._skipped_bias()

    def _decide(self, stock: _Stock, key: tuple[str, int], x: Any) -> tuple[torch.Tensor, Any]:
        """The first eager call of a row count: the stock output, and from now on the variant that gave its bytes."""
        lo = self.split.start(self._rank)
        hi = lo + self.split.size(self._rank)
        versioned = (*key, self._generation) if self._generation else key
        passes = self._checks.passes
        variant = "stock"
        same_columns = passes(
            "columns",
            self.name,
            versioned,
            lambda v: stock(self._module, v)[0][:, lo:hi],
            lambda v: self._own(self._columns(v)),
            x,
            _random_like(x, seed=key[1]),
        )
        whole, skipped = stock(self._module, x)
        if same_columns:
            columns: torch.Tensor | None = None
            failure: Exception | None = None
            try:
                columns = self._columns(x)
            except Exception as error:
                failure = error
            # A rank without columns would leave the others in the gather.
            everyone = self._checks.comm.agreement.agree(failure is None, label="replicated_split:columns")

            def gathered(variant: str) -> Callable[[Any], torch.Tensor]:
                def fast(_: Any) -> torch.Tensor:
                    if failure is not None:
                        raise failure
                    # Not of everyone: nothing is gathered, and the vote of the rank without columns decides.
                    return self._gathered(columns, variant) if everyone and columns is not None else whole

                return fast

            rows, dtype = whole.shape[0], whole.dtype
            if everyone:
                self._checks.prepare("all_gather", [(rows, self.split.widest)], dtype, None)
            if passes("gather", self.name, versioned, lambda _: whole, gathered("padded"), x):
                variant = "padded"
                if self._options.compact and not self.split.even:
                    widths = [(rows, size) for size in self.split.sizes]
                    self._checks.prepare("all_gather_columns", widths, dtype, self.split)
                    if passes("compact", self.name, versioned, lambda _: whole, gathered("compact"), x):
                        variant = "compact"
        self._variants[key] = variant
        return whole, skipped

    def _columns(self, x: Any) -> torch.Tensor:
        """The columns this rank computes, [rows, width]: its own, or the window that contains them."""
        if self._part is None:
            raise layout.CannotSlice(self._why)
        bias = self._module.bias
        part = None if bias is None or self._module.skip_bias_add else bias[self._first : self._first + self._width]
        return self._module.quant_method.apply(self._part, x, part)

    def _own(self, columns: torch.Tensor) -> torch.Tensor:
        return columns[:, self._offset : self._offset + self.split.size(self._rank)]

    def _gathered(self, columns: torch.Tensor, variant: str) -> torch.Tensor:
        comm, split = self._checks.comm, self.split
        if variant == "compact":
            return comm.all_gather_columns(self._own(columns), split, label="replicated_split")
        if columns.shape[1] != split.widest:
            columns = torch.nn.functional.pad(columns, (0, split.widest - columns.shape[1]))
        wide = comm.all_gather(columns, -1, label="replicated_split")
        if split.even:
            return wide
        offsets = [split.window(rank)[1] if self._options.window else 0 for rank in range(split.world)]
        pieces = [wide.narrow(1, rank * split.widest + offsets[rank], size) for rank, size in enumerate(split.sizes)]
        return torch.cat(pieces, dim=1)

    def _skipped_bias(self) -> Any:
        return self._module.bias if self._module.skip_bias_add else None

    def _cut(self) -> None:
        self.kind = layout.kind_of(self._module)
        self._part: SimpleNamespace | None = layout.slice_layer(
            self._module, self.kind, self._first, self._first + self._width
        )
        self._pointers = _pointers(self._module, self.kind)
        self._why = ""

    def _recut(self) -> None:
        """The engine put other tensors in place (a weight update): cut again, and decide every row count again.

        A layout that cannot be cut any more shows in the check, on all ranks.
        """
        self._generation += 1
        self._variants.clear()
        try:
            self._cut()
        except layout.CannotSlice as error:
            self._part, self._why = None, str(error)
            self._pointers = _pointers(self._module, self.kind)


def _pointers(module: Any, kind: layout.Kind) -> tuple[int, ...]:
    return tuple(
        value.data_ptr() if (value := getattr(module, name, None)) is not None else 0 for name in kind.rows_per
    )


def _kind(x: Any) -> str:
    if isinstance(x, tuple):
        return "+".join([type(x).__name__, *(str(part.dtype).removeprefix("torch.") for part in x)])
    return str(x.dtype).removeprefix("torch.")


def _random_like(x: Any, seed: int) -> list[Any]:
    """Three random inputs of the shape of x, the same on every rank: normal values at three magnitudes; for a
    pre-quantized input random finite e4m3 bytes under its real scales."""
    data = x[0] if isinstance(x, tuple) else x
    out: list[Any] = []
    for index in range(_PROBES):
        gen = torch.Generator(data.device).manual_seed(1000 * seed + index)
        if data.dtype.is_floating_point and data.element_size() > 1:
            noise = torch.randn(data.shape, generator=gen, device=data.device, dtype=torch.float32)
            noise = (noise * (1.0, 1e-3, 1e2)[index]).to(data.dtype)
        else:
            magnitude = torch.randint(0, 0x7F, data.shape, generator=gen, device=data.device, dtype=torch.uint8)
            sign = torch.randint(0, 2, data.shape, generator=gen, device=data.device, dtype=torch.uint8) * 0x80
            noise = (magnitude | sign).view(data.dtype)
        if isinstance(x, tuple):
            parts = (noise, *x[1:])
            out.append(type(x)(*parts) if hasattr(x, "_fields") else parts)
        else:
            out.append(noise)
    return out
