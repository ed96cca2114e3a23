"""The draft's target projection on a rank's columns: how its weight is read out of the layer, and the gathered product.
The runtime of draft_main_proj."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..comm import Call, TileSplit
from ..kernels.main_proj import MAX_ROWS, TILE_N, Twin, exact_twin, main_proj
from ._split_layout import CannotSlice

if TYPE_CHECKING:
    from ..comm import Communicator

__all__ = ["MainProj", "read_columns"]

_ROWS_AT_ONCE = 256


def read_columns(layer: Any, lo: int, hi: int) -> torch.Tensor:
    """Rows lo..hi of the layer's weight, [hi - lo, k] bf16, by applying the layer to rows of the identity.

    Exact where the weight is one of bf16: a row of the identity has one group with the amax 1, whose quantization to
    fp8 is exact, each product has one term that is not 0, and the output is bf16. A weight of -0 reads as 0.
    """
    k = layer.input_size
    device = layer.weight.device
    out = torch.empty(hi - lo, k, dtype=torch.bfloat16, device=device)
    for at in range(0, k, _ROWS_AT_ONCE):
        rows = min(_ROWS_AT_ONCE, k - at)
        unit = torch.zeros(rows, k, dtype=torch.bfloat16, device=device)
        at_row = torch.arange(rows, device=device)
        unit[at_row, at + at_row] = 1.0
        out[:, at : at + rows] = layer(unit)[0][:, lo:hi].t()
    return out


class MainProj:
    """main_proj for up to 16 rows: this rank's columns from its exact fp8 twin and the bf16 activation, gathered.

    Raises CannotSlice where the layer cannot be served so.
    """

    def __init__(self, layer: Any, comm: Communicator) -> None:
        if getattr(layer, "bias", None) is not None:
            raise CannotSlice("main_proj has a bias")
        split = TileSplit.plan(layer.output_size, TILE_N, comm.ranks.size)
        if not split:
            raise CannotSlice(str(split))
        lo = split.start(comm.ranks.rank)
        weight = read_columns(layer, lo, lo + split.size(comm.ranks.rank))
        twin = exact_twin(weight)
        if twin is None:
            raise CannotSlice("main_proj's weight is not e4m3 times a power of two for each 32 columns of a row")
        self.twin: Twin = twin
        self._comm = comm
        self._split = split
        self._k = layer.input_size
        self._ready: set[int] = set()  # row counts that ran eagerly: compiled, and the gather declared
        self._guarded = any(transport.needs_prepare for transport in comm.transports.values())
        self.stock_bytes = layer.output_size * layer.input_size  # one byte a weight; scales left out on both sides

    def __deepcopy__(self, memo: Any) -> None:
        """A copied model is a stock model."""

    def serves(self, x: torch.Tensor) -> bool:
        """Whether this call is ours: a decision from what every rank has in common."""
        if x.dim() != 2 or x.dtype != torch.bfloat16 or not 1 <= x.shape[0] <= MAX_ROWS or x.shape[1] != self._k:
            return False
        if torch.compiler.is_compiling():
            return False
        capturing = x.is_cuda and torch.cuda.is_current_stream_capturing()
        return not capturing or x.shape[0] in self._ready

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [m, k] bf16 -> [m, n] bf16, the same bits on every rank. Collective."""
        rows = x.shape[0]
        if rows not in self._ready:
            if self._guarded:
                shapes = dict.fromkeys((rows, size) for size in self._split.sizes)
                calls = [Call("all_gather_columns", shape, torch.bfloat16, 1, split=self._split) for shape in shapes]
                self._comm.prepare(calls, label="draft_main_proj:prepare")
            self._ready.add(rows)
        return self._comm.all_gather_columns(main_proj(x, self.twin), self._split, label="draft_main_proj")
