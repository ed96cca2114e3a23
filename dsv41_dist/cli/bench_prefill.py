"""`bench prefill`: a stack of V4.1-shaped decoder layers, rows whole on every rank and rows in shards.

stock: every sublayer's sum is an all-reduce, the row-local work is done on every row by every rank.
comm: as stock, the all-reduce replaced by reduce-scatter and all-gather.
fast: rows in shards between the sublayers; reduce-scatter and all-gather. exact: the same, but the sum is the
all-reduce of which a rank keeps its rows: the bytes of stock, which is checked.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

import torch

from ..comm import RowMode, RowScope
from ..comm.errors import ArgumentError
from .layer_run import LayerPlan, LayerRun, byte_differences, integers, plan_layers
from .memory import PeakMemory
from .prefill_report import draw, expected
from .prefill_rows import STREAMS, row_bytes
from .prefill_stack import Counted, Result, Shape, Stack, rows_in
from .session import Place, choose_device

__all__ = ["PrefillPlan", "plan_prefill", "run_prefill"]

#: Largest relative difference (of the Euclidean norms) that another order of the sums may make.
FAR = 0.05
#: rows, hidden, layers, passes. GPU: the model's width. CPU: seconds on two cores.
_DEFAULTS = {"cuda": ("2048,4096,8192,16384", "5120", "2", "10"), "cpu": ("256,512", "256", "2", "3")}
_HEADER = (
    f"{'rows':>7}  {'mode':<6}{'p50':>12}{'stock/this':>11}{'bound':>8}{'parts':>8}{'row part':>12}{'stock/this':>11}"
    f"{'sent':>9}{'peak':>9}{'#wrong':>8}  difference"
)
_UNITS = f"{'':>7}  {'':<6}{'(us)':>12}{'':>11}{'':>8}{'':>8}{'(us)':>12}{'':>11}{'(MiB)':>9}{'(MiB)':>9}"


@dataclass(frozen=True)
class PrefillPlan:
    """Everything a rank needs to run it."""

    layers: LayerPlan
    rows: tuple[int, ...]
    hidden: int
    depth: int
    modes: tuple[RowMode, ...]


def plan_prefill(
    *,
    tokens: str | None,
    hidden: str | None,
    depth: str | None,
    modes: str,
    iterations: str | None,
    device: str,
    **shared: Any,
) -> tuple[PrefillPlan, Place]:
    """Check every argument; `shared` are those of `plan_layers`. Raises ArgumentError (exit 2)."""
    usual = _DEFAULTS[choose_device(device)]
    plan, place = plan_layers(**shared, device=device, iterations=iterations or usual[3], graphs_on_gpu=0)
    rows = integers("--tokens", tokens or usual[0], 1, 2**20)
    step = rows_in(place.size)
    for count in rows:
        if count % step:
            raise ArgumentError(f"--tokens {count}: allowed over {place.size} ranks are multiples of {step}")
    width = integers("--hidden", hidden or usual[1], 64, 2**16)
    if len(width) != 1 or width[0] % 64:
        raise ArgumentError(f"--hidden {hidden!r}: allowed is one multiple of 64")
    try:
        Shape.of(width[0]).check(place.size)
    except ArgumentError as error:
        raise ArgumentError(f"--ranks {place.size}: {error}") from None
    depths = integers("--layers", depth or usual[2], 1, 43)
    if len(depths) != 1:
        raise ArgumentError(f"--layers {depth!r}: allowed is one number")
    chosen: list[RowMode] = []
    for name in modes.split(","):
        mode = next((known for known in get_args(RowMode) if known == name), None)
        if mode is None:
            raise ArgumentError(f"--modes {name!r}: allowed is {', '.join(get_args(RowMode))}")
        chosen.append(mode)
    return PrefillPlan(plan, rows, width[0], depths[0], tuple(dict.fromkeys(chosen))), place


def run_prefill(rank: int, size: int, plan: PrefillPlan) -> int:
    """Join, run every row count and mode, and on rank 0 report. Returns the exit code, the same on every rank."""
    run = LayerRun(rank, size, plan.layers)
    stack = Stack(Shape.of(plan.hidden), plan.depth, run.comm)
    run.say(
        f"# dsv41_dist bench prefill: {size} ranks, {plan.layers.device}, {plan.depth} layers of hidden {plan.hidden}, "
        f"{plan.layers.iterations} passes, check {'on' if plan.layers.check else 'OFF'}"
        + (f", {plan.layers.graphs} replays of a CUDA graph" if plan.layers.graphs else "")
    )
    run.say(_HEADER)
    run.say(_UNITS)
    for carrier, comm in run.carriers().items():
        for rows in plan.rows:
            _Chunk(run, stack.over(comm), carrier, rows).measure(plan.modes)
    return run.finish({}, draw)


class _Chunk:
    """One row count over one carrier: the parts, stock, and each mode against it."""

    def __init__(self, run: LayerRun, stack: Stack, carrier: str, rows: int) -> None:
        self.run, self.stack, self.carrier, self.rows = run, stack, carrier, rows
        self.comm = stack.comm
        self.start = stack.start(rows)

    def measure(self, modes: tuple[RowMode, ...]) -> None:
        self.stack.run(self.start, None)  # compiles, and lets libraries take their workspaces
        parts = self._parts()
        stock, kept = self._line(None, parts, None, None)
        self.run.spoil()  # --flip-byte: what stock gave is right
        for mode in modes:
            self._line(mode, parts, stock, kept)

    def _scope(self, mode: RowMode | None, comm: Any) -> RowScope | None:
        if mode is None:
            return None
        # In place, as stock's sum is.
        return RowScope(comm, self.rows, mode, all_reduce=lambda x: comm.all_reduce(x, out=x, label="prefill:sum"))

    def _parts(self) -> dict[str, Any]:
        """The row-local work on all rows and on a shard's, and the collectives of one sublayer, each alone."""
        run, stack, comm, world = self.run, self.stack, self.comm, self.run.world
        hidden = stack.shape.hidden
        y = torch.zeros(self.rows, hidden, dtype=self.start.dtype, device=self.start.device)
        held = self.rows // world
        x = self.start[:, 0].contiguous()
        mine = RowScope(comm, self.rows, "fast").take(x)
        found: dict[str, Any] = {}
        for name, call in {
            "engram_us": partial(stack.engram, x),
            "engram_shard_us": partial(stack.engram, mine),
            "row_work_us": partial(stack.row_work, self.start, y),
            "row_work_shard_us": partial(stack.row_work, self.start[:held], y[:held]),
            "all_reduce_us": partial(comm.all_reduce, y, out=y, label="prefill:part"),
            "reduce_scatter_us": partial(comm.reduce_scatter, y, label="prefill:part"),
            "all_gather_us": partial(comm.all_gather, y[:held], label="prefill:part"),
        }.items():
            found[name] = run.time([call])[0]["p50_us"]
        ratio = found["row_work_us"] / found["row_work_shard_us"]
        nbytes = self.rows * (row_bytes(hidden) * len(stack.sublayers) + 2 * hidden * (STREAMS + 1))
        found |= {
            "row_work_ratio": round(ratio, 3),
            "engram_ratio": round(found["engram_us"] / found["engram_shard_us"], 3),
            "engram_differing": self._engram_differs(x, mine),
            "row_work_gbps": round(nbytes / found["row_work_us"] / 1e3, 2),
            "sublayer_flops": stack.shape.flops(self.rows, world) * stack.layers,
            "routes": {
                "all_reduce": comm.route_name("all_reduce", y, reduce_op="sum"),
                "reduce_scatter": comm.route_name("reduce_scatter", y, reduce_op="sum"),
                "all_gather": comm.route_name("all_gather", y[:held]),
            },
        }
        self._record("prefill parts", found)
        bytes_of = {None: "not compared", 0: "the same bytes"}.get(found["engram_differing"], "other bytes")
        times = {name: found[f"{name}_us"] for name in found["routes"]}
        sums = ", ".join(f"{name} {us:.0f} us ({found['routes'][name]})" for name, us in times.items())
        run.say(f"{self.rows:>7}  alone, over {self.carrier}: {sums}")
        run.say(
            f"{'':>7}  row-local work {found['row_work_us']:.0f} us on all rows ({found['row_work_gbps']:.0f} GB/s), "
            f"{found['row_work_shard_us']:.0f} us on 1/{world}: {ratio:.2f}x; Engram's projection "
            f"{found['engram_us']:.0f} and {found['engram_shard_us']:.0f} us: {found['engram_ratio']:.2f}x, {bytes_of}"
        )
        return found

    def _engram_differs(self, x: torch.Tensor, mine: torch.Tensor) -> int | None:
        """Elements of the shards' projection that differ from the whole one's in a byte, over all ranks. Not an error:
        a product of fewer rows may take another kernel, which is why prefill_sp checks it before it shards it."""
        if not self.run.plan.check:
            return None
        whole = RowScope(self.comm, self.rows, "fast").take(self.stack.engram(x))
        differ = byte_differences(self.stack.engram(mine), whole)
        return sum(self.run.comm.agreement.gather(differ, label="prefill:engram"))

    def _record(self, op: str, found: dict[str, Any]) -> dict[str, Any]:
        stack, run = self.stack, self.run
        line = {
            "op": op, "rows": self.rows, "hidden": stack.shape.hidden, "layers": stack.layers, "world": run.world,
            "dtype": "bfloat16", "transport": self.carrier, "graph": run.plan.graphs, **found,
        }  # fmt: skip
        run.rows.append(line)
        return line

    def _line(
        self, mode: RowMode | None, parts: dict[str, Any], stock: dict[str, Any] | None, kept: Result | None
    ) -> tuple[dict[str, Any], Result]:
        run, stack = self.run, self.stack
        counted = Counted(self.comm)
        with PeakMemory(run.device) as peak:
            first = stack.run(self.start, self._scope(mode, counted), counted)
            if run.device.type == "cuda":
                run.comm.synchronize(label="prefill:peak")
        scope = self._scope(mode, self.comm)
        found, (last,) = run.time([partial(stack.run, self.start, scope)])
        alone, _ = run.time([partial(stack.run, self.start, scope, work=False)])
        line: dict[str, Any] = {
            "mode": mode or "stock", **found, "row_part_us": alone["p50_us"],
            "sent_bytes": counted.sent, "calls": counted.calls,
            "peak_bytes": max(run.comm.agreement.gather(peak.bytes or 0, label="prefill:peak")) or None, "wrong": None,
        }  # fmt: skip
        if stock is not None:
            line["over_stock"] = round(stock["p50_us"] / found["p50_us"], 3)
            line["row_part_over_stock"] = round(stock["row_part_us"] / alone["p50_us"], 3)
            line |= expected(mode or "", stock["p50_us"], parts, len(stack.sublayers), run.world)
        if run.plan.check:
            line |= self._compare(mode, [first, last], kept or first)
        line = self._record("prefill", line)
        self._say(line)
        return line, first

    def _compare(self, mode: RowMode | None, results: list[Result], kept: Result) -> dict[str, Any]:
        """Differing elements (of all ranks), the largest difference and the relative one (of the worst rank)."""
        run = self.run
        scope = self._scope(mode, self.comm)
        differ, largest, relative = 0, 0.0, 0.0
        for result in results:
            same_rows = kept.residual if scope is None else scope.take(kept.residual)
            for got, want in ((result.out, kept.out), (result.residual, same_rows)):
                differ += byte_differences(got, want)
                gap = got.float() - want.float()
                largest = max(largest, float(gap.abs().max()))
                relative = max(relative, float(gap.norm() / want.float().norm()))
                # A NaN is no maximum: it must not pass for a small difference.
                if not bool(torch.isfinite(gap).all()):
                    largest = relative = float("inf")
        said = run.comm.agreement.gather([differ, largest, relative], label="prefill:compare")
        differ, largest, relative = sum(s[0] for s in said), max(s[1] for s in said), max(s[2] for s in said)
        wrong = differ if mode in (None, "exact") else int(not relative <= FAR)
        run.wrong += wrong
        return {
            "wrong": wrong,
            "differing": differ,
            "largest_difference": str(largest) if largest == float("inf") else largest,
            "relative_difference": str(relative) if relative == float("inf") else round(relative, 9),
        }

    def _say(self, line: dict[str, Any]) -> None:
        def cell(name: str, width: int, form: str = ".2f", scale: float = 1.0) -> str:
            value = line.get(name)
            return f"{'':>{width}}" if value is None else f"{value / scale:>{width}{form}}"

        wrong = "N/A" if line["wrong"] is None else str(line["wrong"])
        text = (
            f"{line['rows']:>7}  {line['mode']:<6}{line['p50_us']:>12.1f}{cell('over_stock', 11)}{cell('bound', 8)}"
            f"{cell('parts', 8)}{line['row_part_us']:>12.1f}{cell('row_part_over_stock', 11)}"
            f"{cell('sent_bytes', 9, '.1f', 2**20)}{cell('peak_bytes', 9, '.1f', 2**20)}{wrong:>8}"
        )
        if line["mode"] != "stock" and "differing" in line:
            text += f"  {line['differing']} elements, largest {float(line['largest_difference']):.3g}"
        self.run.say(text)
