"""Which rows take the fused mix statistics, decided by bytes, by a measurement and by the group: hc_fused's runtime."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..comm import SelfCheck, same_bytes
from ..engine.logical_rows import logical_rows
from ..kernels.hc_fused import MAX_ROWS, PLANS, Plan, mix_sums

if TYPE_CHECKING:
    from ..comm import Communicator
    from ..engine.state import AdapterState

__all__ = ["FLOOR", "HcFused", "fused_stats"]

FLOOR = 512  # rows below which nothing is measured: too few programs for any device
_REPEATS = 5
Stock = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
Size = tuple[int, int, int]


class _Scope(threading.local):
    prefill: bool = False


class _Unfit(Exception):
    """No plan gives the stock bytes here."""


class _Chosen(NamedTuple):
    plan: Plan
    fused_ms: float
    stock_ms: float


def fused_stats(mhc: Any, plan: Plan, arguments: tuple[Any, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What `hc_mix_stats_sinkhorn(*arguments)` of the engine's module `mhc` gives, its statistics in one pass: pre
    [M, h], post [M, h], comb [M, h, h], fp32. The engine's own kernel makes them from the sums, as of one slice."""
    x, weight, scale, base, streams, iterations, rms_eps, eps = arguments
    rows, k = x.shape
    # The same widths of a tile and numbers of slices as the split form, from the engine's own functions.
    mix, sq = mix_sums(
        x,
        weight,
        slices=mhc._num_slices_for(k),
        block_k=mhc._HC_MIX_BLOCK_K,
        precision=mhc._HC_MIX_DOT_PRECISION,
        plan=plan,
    )
    pre, post = (torch.empty(rows, streams, dtype=torch.float32, device=x.device) for _ in range(2))
    comb = torch.empty(rows, streams, streams, dtype=torch.float32, device=x.device)
    mhc._hc_mix_reduce_sinkhorn_kernel[(rows,)](
        mix, sq, scale.float().contiguous(), base.float().contiguous(), pre, post, comb, rows, 1.0 / k, rms_eps,
        MIX=weight.shape[0], HC=streams, NUM_SLICES=1, ITERS=iterations, EPS=eps, num_warps=1,
    )  # fmt: skip
    return pre, post, comb


class HcFused:
    """One per process. Every decision follows from facts that the ranks have in common, or from a vote.

    A size is the row count that kernels are chosen for (`logical_rows`: the whole chunk's while a rank holds a shard)
    and the rows that are there, each to a power of two, and stock's tile height for the former. Its first eager call
    measures every plan that gives the stock bytes, compares the best one's outputs on every rank, and is fused from
    then on where that is faster on every rank. One differing byte anywhere ends it for good, for all sizes.
    """

    def __init__(self, comm: Communicator, state: AdapterState, mhc: Any, min_rows: int | None) -> None:
        self.comm = comm
        self.state = state
        self.stock_calls: dict[str, int] = {}
        self._mhc = mhc
        self._min_rows = min_rows
        self._check = SelfCheck(comm.agreement, "hc_fused")
        self._plans: dict[Size, Plan | None] = {}  # None: the stock form is faster
        self._off = ""
        self._scope = _Scope()

    @contextmanager
    def prefill(self) -> Generator[None]:
        """While open, on this thread, an eager prefill of the target model runs."""
        self._scope.prefill = True
        try:
            yield
        finally:
            self._scope.prefill = False

    def run(self, stock: Stock, arguments: tuple[Any, ...]) -> Any:
        """The statistics of one call. Collective, at the first call of a size."""
        x = arguments[0]
        rows = x.shape[0]
        logical = logical_rows(rows)
        why = self._not_this_call(x, logical)
        if why is not None:
            self.stock_calls[why] = self.stock_calls.get(why, 0) + 1
            return stock(*arguments)
        size = logical.bit_length() - 1, rows.bit_length() - 1, self._mhc._block_m_for(logical)
        if size not in self._plans:
            return self._decide(size, stock, arguments)
        plan = self._plans[size]
        if plan is None:
            self.stock_calls["slower"] = self.stock_calls.get("slower", 0) + 1
            return stock(*arguments)
        self.state.fire()
        return fused_stats(self._mhc, plan, arguments)

    def _not_this_call(self, x: torch.Tensor, logical: int) -> str | None:
        if not self._scope.prefill:
            return "no prefill"
        if logical < (FLOOR if self._min_rows is None else self._min_rows):
            return "too few rows"
        if x.shape[0] > MAX_ROWS or x.shape[0] * x.stride(0) >= 2**31:
            return "too many rows"
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            return "graph capture"
        return self._off or None

    def _decide(self, size: Size, stock: Stock, arguments: tuple[Any, ...]) -> Any:
        wanted = stock(*arguments)
        chosen: _Chosen | None = None
        failure: Exception | None = None
        try:
            chosen = self._fastest(wanted, stock, arguments)
        except Exception as error:
            failure = error

        def fused() -> Any:
            if chosen is None:
                raise failure or _Unfit()
            return fused_stats(self._mhc, chosen.plan, arguments)

        self._check.run(size, lambda: wanted, fused)
        at = f"{1 << size[0]} rows" + (f" ({1 << size[1]} on a rank)" if size[0] != size[1] else "")
        at += f", stock tile {size[2]}"
        if not self._check.verdict(size):
            self._off = "differs from stock"
            self.state.notes.append(f"off for good at {at}: {self._check.reasons[size]}")
            return wanted
        assert chosen is not None
        times = f"{chosen.fused_ms:.3f} ms against {chosen.stock_ms:.3f} ms" if chosen.stock_ms else "not timed"
        faster = self._min_rows is not None or chosen.fused_ms < chosen.stock_ms
        if self.comm.agreement.agree(faster, label=f"hc_fused:faster:{size}"):
            self._plans[size] = chosen.plan
            self.state.notes.append(f"from {at}: fused, {times} ({chosen.plan})")
        else:
            self._plans[size] = None
            self.state.notes.append(f"from {at}: stock, here {times}")
        return wanted

    def _fastest(self, wanted: Any, stock: Stock, arguments: tuple[Any, ...]) -> _Chosen:
        """Local: the fastest plan with the stock bytes, and the times of one call."""
        fits = []
        said: list[str] = []
        for plan in PLANS:
            difference = same_bytes(wanted, fused_stats(self._mhc, plan, arguments))
            if difference is None:
                fits.append(plan)
            else:
                said.append(f"{plan}: {difference}")
        if not fits:
            raise _Unfit("; ".join(said))
        if not arguments[0].is_cuda:
            return _Chosen(fits[0], 0.0, 0.0)  # an interpreter's time says nothing
        stock_ms = _milliseconds(lambda: stock(*arguments))
        times = {plan: _milliseconds(lambda plan=plan: fused_stats(self._mhc, plan, arguments)) for plan in fits}
        best = min(fits, key=lambda plan: times[plan])
        return _Chosen(best, times[best], stock_ms)


def _milliseconds(call: Callable[[], Any]) -> float:
    """The shortest of a few calls on the current stream, between events; the host waits."""
    times = []
    for _ in range(_REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return min(times)
