"""`bench split`: replicated layers whole and split over the ranks, with the adapters' own runtime.

The whole layer is torch's linear, which is what the engine's unquantized layer calls; for the draft's projection it is
the same GEMV over all columns. On a GPU the layers take turns over more weight than the L2 holds, as those of a model
do. Every split is compared with the whole layer, eagerly and after the timed calls.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..adapters._split_linear import Checks, SplitLayer, SplitOptions
from ..adapters._split_main_proj import MainProj
from ..comm import TileSplit
from ..comm.errors import ArgumentError
from ..engine.state import AdapterState
from ..kernels.main_proj import MAX_ROWS, TILE_N, Twin, exact_twin, main_proj
from .layer_run import LayerPlan, LayerRun, integers, plan_layers, types
from .ops import DTYPES, TILE
from .session import Place
from .split_report import break_even, draw, lines_of

__all__ = ["SplitPlan", "plan_split", "run_split"]

_DTYPES = ("bfloat16", "float16", "float32")
_ROTATED_BYTES = 300_000_000
_COPY_BYTES = 256 << 20
#: What is measured without further options. GPU: wqkv_a, two widths between, engram.wkv of DeepSeek-V4.1-Flash, and the
#: draft's projection of three target layers. CPU: small enough for four ranks on two cores.
_DEFAULTS = {"cuda": ("5120", "1792,5120,10240,25600", "5120x15360"), "cpu": ("1024", "512,1792", "512x256")}
_HEADER = f"{'layer':<18}{'n x k':>14}{'m':>5}  {'what':<38}{'p50':>10}{'p99':>10}{'whole/this':>11}{'#wrong':>8}"


@dataclass(frozen=True)
class SplitPlan:
    """Everything a rank needs. `draft`: (output, input columns) of the draft's projection, or None."""

    layers: LayerPlan
    rows: tuple[int, ...]
    hidden: int
    columns: tuple[int, ...]
    draft: tuple[int, int] | None
    dtypes: tuple[str, ...]


def plan_split(
    *, tokens: str, hidden: str | None, columns: str | None, draft: str | None, dtype: str, **shared: Any
) -> tuple[SplitPlan, Place]:
    """Check every argument; `shared` are those of `plan_layers`. Raises ArgumentError (exit 2)."""
    plan, place = plan_layers(**shared, graphs_on_gpu=30)
    usual = _DEFAULTS[plan.device]
    rows = integers("--tokens", tokens, 1, 2**16)
    inputs = integers("--hidden", hidden or usual[0], 1, 2**20)
    if len(inputs) != 1:
        raise ArgumentError(f"--hidden {hidden!r}: allowed is one number")
    widths = integers("--columns", columns or usual[1], 1, 2**22)
    for width in widths:
        split = TileSplit.plan(width, TILE, place.size)
        if not split:
            raise ArgumentError(f"--columns {width}: {split}")
    return SplitPlan(
        plan, rows, inputs[0], widths, _projection(draft or usual[2], place.size), types(dtype, _DTYPES)
    ), place


def _projection(text: str, world: int) -> tuple[int, int] | None:
    if text == "none":
        return None
    match = re.fullmatch(r"(\d+)x(\d+)", text)
    n, k = (int(match[1]), int(match[2])) if match else (0, 0)
    if not match or not 0 < n * k < 2**31 or k % 32:
        raise ArgumentError(f"--draft {text!r}: allowed is none, or WIDTHxINPUTS with inputs in multiples of 32")
    split = TileSplit.plan(n, TILE_N, world)
    if not split:
        raise ArgumentError(f"--draft {text!r}: {split}")
    return n, k


def run_split(rank: int, size: int, plan: SplitPlan) -> int:
    """Join, run every layer, and on rank 0 report. Returns the exit code, the same on every rank."""
    bench = _Bench(LayerRun(rank, size, plan.layers), plan)
    run = bench.run
    run.say(
        f"# dsv41_dist bench split: {size} ranks, {plan.layers.device}, gathers over {run.carrier}, "
        f"{plan.layers.iterations} calls, check {'on' if plan.layers.check else 'OFF'}"
        + (f", {plan.layers.graphs} replays of a CUDA graph" if plan.layers.graphs else "")
    )
    run.say(_HEADER)
    run.say(f"{'':<18}{'':>14}{'':>5}  {'':<38}{'(us)':>10}{'(us)':>10}")
    for dtype in plan.dtypes:
        for n in plan.columns:
            bench.linear(n, plan.hidden, dtype)
    if plan.draft is not None:
        bench.projection(*plan.draft)
    evens = break_even(run.rows)
    for line in lines_of(evens, run.rows):
        run.say(f"# {line}")
    return run.finish({"break_even": evens, "notes": bench.notes}, draw)


class UnquantizedLinearMethod:
    """What the engine's method of this name does for a plain weight."""

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return torch.nn.functional.linear(x, layer.weight, bias)


class Layer(torch.nn.Module):
    """A replicated linear layer as the adapters see it: weight [n, k], no bias."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.register_parameter("bias", None)
        self.output_size, self.input_size = weight.shape
        self.params_dtype, self.skip_bias_add = weight.dtype, False
        self.quant_method = UnquantizedLinearMethod()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return whole(self, x)


def whole(layer: Any, x: torch.Tensor) -> tuple[torch.Tensor, None]:
    return layer.quant_method.apply(layer, x, None), None


def _first(call: Callable[..., tuple[torch.Tensor, Any]], *args: Any) -> torch.Tensor:
    return call(*args)[0]


class _Bench:
    def __init__(self, run: LayerRun, plan: SplitPlan) -> None:
        self.run, self.plan, self.notes = run, plan, list[str]()

    def row(self, layer: str, n: int, k: int, m: int, what: str, found: Any, nbytes: int, **more: Any) -> None:
        """`nbytes`: of weight that this rank streams a call, the widest rank's."""
        transport = self.run.carrier if what.startswith("split") else "none"
        line: dict[str, Any] = {
            "op": "split", "layer": layer, "n": n, "k": k, "m": m, "what": what, "bytes": nbytes, "dtype": "bfloat16",
            "redop": "none", "transport": transport, "graph": self.run.plan.graphs, **found,
            "algbw_gbps": round(nbytes / found["p50_us"] / 1e3, 3), "wrong": None, **more,
        }  # fmt: skip
        self.run.rows.append(line)
        ratio = f"{line['whole_over_this']:.3f}" if "whole_over_this" in line else ""
        wrong = "N/A" if line["wrong"] is None else str(line["wrong"])
        self.run.say(
            f"{layer:<18}{f'{n}x{k}':>14}{m:>5}  {what:<38}{line['p50_us']:>10.2f}{line['p99_us']:>10.2f}"
            f"{ratio:>11}{wrong:>8}" + (f"  {line['verdict']}" if "verdict" in line else "")
        )

    def copies(self, nbytes: int, most: int = 20) -> int:
        """How many layers must take turns so that none stays in the L2."""
        if self.run.plan.device != "cuda":
            return 1
        return max(1, min(most, -(-_ROTATED_BYTES // nbytes)))

    def linear(self, n: int, k: int, dtype: str) -> None:
        run, world = self.run, self.run.world
        item = DTYPES[dtype].itemsize
        layers = [Layer(run.random(n, k, seed=i, dtype=dtype) * 0.02) for i in range(self.copies(item * n * k))]
        split = TileSplit(n, TILE, world)
        state = AdapterState("replicated_split", "bit-identical")
        checks = Checks(run.comm, state)
        variants = {"split, padded gather": False} | ({} if split.even else {"split, compact gather": True})
        for m in self.plan.rows:
            x = run.random(m, k, seed=m, dtype=dtype)
            want = [whole(layer, x)[0] for layer in layers]
            stock, _ = run.time([partial(_first, whole, layer, x) for layer in layers])
            self.row("linear", n, k, m, "whole", stock, item * n * k, dtype=dtype, sizes=list(split.sizes))
            for what, compact in variants.items():
                options = SplitOptions(max(self.plan.rows), True, compact, lambda: False)
                parts = [SplitLayer(f"{what} {i}", layer, split, checks, options) for i, layer in enumerate(layers)]
                decided = [part.forward(whole, x)[0] for part in parts]
                verdicts = sorted({verdict for part in parts for verdict in part._variants.values()})
                run.spoil()
                wrong = run.differing(decided + [part.forward(whole, x)[0] for part in parts], want + want)
                found, last = run.time([partial(_first, part.forward, whole, x) for part in parts])
                alone, _ = run.time([partial(part._columns, x) for part in parts])
                again = run.differing(last, want)
                facts = {
                    "verdict": verdicts[0] if len(verdicts) == 1 else "mixed",
                    "wrong": None if wrong is None or again is None else wrong + again,
                    "whole_over_this": round(stock["p50_us"] / found["p50_us"], 3),
                    "columns_only_us": alone["p50_us"],
                }
                self.row("linear", n, k, m, what, found, item * split.widest * k, dtype=dtype, **facts)
        self.notes += [f"{n}x{k} {dtype}: {note}" for note in state.notes]

    def projection(self, n: int, k: int) -> None:
        """The draft's projection: the GEMV over all columns on each rank, and split."""
        run, world = self.run, self.run.world
        gen = torch.Generator(run.device).manual_seed(0)
        codes = torch.randint(0, 0x7F, (n, k), generator=gen, device=run.device, dtype=torch.uint8)
        weight = codes.view(torch.float8_e4m3fn).to(torch.bfloat16) * 2.0**-9
        proj = MainProj(Layer(weight), run.comm)
        split = proj._split
        full = exact_twin(weight)
        assert full is not None
        count = self.copies(n * k // world)
        both = [_copy(proj.twin) for _ in range(count - 1)] + [proj.twin]
        copies = [full] + [_copy(full) for _ in range(max(1, count // world) - 1)]
        weights = [weight] + [weight.clone() for _ in range(1 if count > 1 else 0)]
        copy = self.copy_gbps()
        name = "draft main_proj"
        for m in (m for m in self.plan.rows if m <= MAX_ROWS):
            x = run.random(m, k, seed=m)
            want = main_proj(x, full)
            one, _ = run.time([partial(main_proj, x, twin) for twin in copies])
            self.row(name, n, k, m, "fp8 GEMV, all columns on each rank", one, full.nbytes)
            dense, _ = run.time([partial(torch.nn.functional.linear, x, w) for w in weights])
            self.row(name, n, k, m, "bf16 linear, all columns on each rank", dense, weight.nbytes)
            alone, _ = run.time([partial(main_proj, x, twin) for twin in both])
            proj(x)  # declares the gather
            run.spoil()
            found, last = run.time([partial(self.gathered, x, twin, split) for twin in both])
            # The chunks of the sum depend on the shape of the weight, so all columns at once need not give these bits.
            same = torch.cat(_columns_of(x, full, split), dim=1)
            wrong = run.differing([*last, proj(x)], [same] * (len(last) + 1))
            gbps = (both[0].nbytes + 2 * m * (k + both[0].codes.shape[1])) / alone["p50_us"] / 1e3
            near = ((last[0].float() - want.float()).abs().max() / want.float().abs().mean()).item()
            facts = {
                "wrong": wrong,
                "whole_over_this": round(one["p50_us"] / found["p50_us"], 3),
                "columns_only_us": alone["p50_us"],
                "gemv_gbps": round(gbps, 1),
                "copy_gbps": round(copy, 1),
                "over_copy": round(gbps / copy, 3),
                "from_all_columns": round(near, 5),
            }
            self.row(name, n, k, m, "split", found, split.widest * k * 33 // 32, **facts)

    def gathered(self, x: torch.Tensor, twin: Twin, split: TileSplit) -> torch.Tensor:
        """As MainProj does it, with a copy of its twin."""
        return self.run.comm.all_gather_columns(main_proj(x, twin), split, label="bench:split")

    def copy_gbps(self) -> float:
        """Bytes read and written by a copy of 256 MiB (1 MiB on a CPU), over its time."""
        run = self.run
        source = torch.zeros(
            _COPY_BYTES if run.plan.device == "cuda" else 1 << 20, dtype=torch.uint8, device=run.device
        )
        target = torch.empty_like(source)
        found, _ = run.time([partial(target.copy_, source)])
        return 2 * source.nbytes / found["p50_us"] / 1e3


def _copy(twin: Twin) -> Twin:
    return Twin(twin.codes.clone(), twin.exponents.clone())


def _columns_of(x: torch.Tensor, full: Twin, split: TileSplit) -> list[torch.Tensor]:
    """What each rank's GEMV gives, computed here on cut twins."""
    cuts = [slice(start, start + size) for start, size in zip(split.starts, split.sizes, strict=True)]
    return [main_proj(x, Twin(full.codes[:, c].contiguous(), full.exponents[:, c].contiguous())) for c in cuts]
