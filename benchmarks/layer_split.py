"""Replicated layers whole and split, on every rank: `torchrun --nproc-per-node N benchmarks/layer_split.py OUT.json`.

On GPUs (2 to 4 of one host, gathers over peer) a figure is microseconds per call inside a CUDA graph; on CPU ranks
(gloo, small shapes, for a smoke run) it is wall clock. The layers take turns over more weight than the L2 holds, as the
layers of a model do. Every split is compared with the whole layer, eagerly and after the replays: `wrong` counts
elements that differ in a byte. What runs is the adapters' own runtime; the whole layer is torch's linear (what the
engine's unquantized layer calls), and for the draft's projection the same GEMV over all columns.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from dsv41_dist.adapters._split_linear import Checks, SplitLayer, SplitOptions
from dsv41_dist.adapters._split_main_proj import MainProj
from dsv41_dist.cli.environment import environment
from dsv41_dist.comm import CommSettings, Communicator, Ranks, TileSplit
from dsv41_dist.engine.state import AdapterState
from dsv41_dist.kernels.main_proj import Twin, exact_twin, main_proj

CUDA = torch.cuda.is_available()
ROWS = (1, 6, 16, 48, 96) if CUDA else (1, 6)
# wqkv_a, a square layer, engram.wkv of DeepSeek-V4.1-Flash; the draft's projection of three target layers.
SHAPES = ((1792, 5120), (5120, 5120), (25600, 5120)) if CUDA else ((1792, 256), (1024, 256))
PROJ = (5120, 15360) if CUDA else (512, 256)
ROTATED_BYTES = 300_000_000 if CUDA else 1
INNER, REPLAYS = 20, 30


class UnquantizedLinearMethod:
    """What the engine's method of this name does for a plain weight."""

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return torch.nn.functional.linear(x, layer.weight, bias)


class Layer(torch.nn.Module):
    """A replicated linear layer as the adapters see it."""

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


def first(call: Callable[..., tuple[torch.Tensor, Any]], *args: Any) -> torch.Tensor:
    return call(*args)[0]


def start() -> Communicator:
    if CUDA:
        import peer_common

        return peer_common.start()[1]
    dist.init_process_group("gloo")
    return Communicator.create(Ranks.from_torch())


class Bench:
    def __init__(self) -> None:
        self.comm = start()
        self.rank, self.world = self.comm.ranks.rank, self.comm.ranks.size
        self.device = self.comm.ranks.device
        self.rows: list[dict[str, Any]] = []
        self.wrong = 0

    def random(self, *shape: int, seed: int) -> torch.Tensor:
        gen = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(*shape, generator=gen, device=self.device).to(torch.bfloat16)

    def time(self, calls: list[Callable[[], torch.Tensor]]) -> tuple[float, list[torch.Tensor]]:
        """Median microseconds per call of the slowest rank, and what the last round of calls gave."""
        last: list[torch.Tensor] = [torch.empty(0)] * len(calls)
        turn = itertools.count()

        def call() -> None:
            at = next(turn) % len(calls)
            last[at] = calls[at]()

        inner = -(-INNER // len(calls)) * len(calls)  # whole rounds
        if CUDA:
            import peer_common

            times = peer_common.replay_times(peer_common.capture(call, inner), REPLAYS, inner)
        else:
            times = []
            for _ in range(3):
                begin = time.perf_counter()
                for _ in calls:
                    call()
                times.append((time.perf_counter() - begin) * 1e6 / len(calls))
        return max(self.comm.agreement.gather(statistics.median(times), label="layer_split:time")), last

    def row(self, layer: str, n: int, k: int, m: int, what: str, us: float, **more: Any) -> float:
        self.rows.append({"layer": layer, "n": n, "k": k, "m": m, "dtype": "bfloat16", "what": what, **more})
        self.rows[-1]["p50_us"] = round(us, 3)
        self.wrong += more.get("wrong") or 0
        return us

    def differing(self, got: list[torch.Tensor], want: list[torch.Tensor]) -> int:
        mine = sum(int((a.view(torch.int16) != b.view(torch.int16)).sum()) for a, b in zip(got, want, strict=True))
        return sum(self.comm.agreement.gather(mine, label="layer_split:wrong"))

    def linear(self, n: int, k: int) -> None:
        count = max(1, min(20, -(-ROTATED_BYTES // (2 * n * k))))
        layers = [Layer(self.random(n, k, seed=index) * 0.02) for index in range(count)]
        split = TileSplit.plan(n, 128, self.world)
        if not split:
            self.rows.append({"layer": "linear", "n": n, "k": k, "what": "declined", "reason": str(split)})
            return
        state = AdapterState("replicated_split", "bit-identical")
        checks = Checks(self.comm, state)
        variants = {"split, padded gather": False} | ({} if split.even else {"split, compact gather": True})
        for m in ROWS:
            x = self.random(m, k, seed=m)
            want = [whole(layer, x)[0] for layer in layers]
            stock, _ = self.time([partial(first, whole, layer, x) for layer in layers])
            self.row("linear", n, k, m, "whole", stock, sizes=list(split.sizes), layers=count)
            for what, compact in variants.items():
                options = SplitOptions(96, True, compact, lambda: False)
                parts = [SplitLayer(f"{what} {i}", layer, split, checks, options) for i, layer in enumerate(layers)]
                decided = [part.forward(whole, x)[0] for part in parts]
                verdicts = sorted({verdict for part in parts for verdict in part._variants.values()})
                eager = self.differing(decided + [p.forward(whole, x)[0] for p in parts], want + want)
                us, last = self.time([partial(first, part.forward, whole, x) for part in parts])
                alone, _ = self.time([partial(part._columns, x) for part in parts])
                wrong = eager + self.differing(last, want)
                facts = {"verdicts": verdicts, "wrong": wrong, "whole_over_this": round(stock / us, 3)}
                self.row("linear", n, k, m, what, us, **facts, columns_only_us=round(alone, 3))
        self.rows.append({"layer": "linear", "n": n, "k": k, "what": "notes", "notes": state.notes})

    def projection(self, n: int, k: int) -> None:
        """The draft's projection: the GEMV over all columns on each rank, and split."""
        count = max(1, min(20, -(-ROTATED_BYTES // (n * k // self.world))))
        gen = torch.Generator(self.device).manual_seed(0)
        codes = torch.randint(0, 0x7F, (n, k), generator=gen, device=self.device, dtype=torch.uint8)
        weight = codes.view(torch.float8_e4m3fn).to(torch.bfloat16) * 2.0**-9
        proj = MainProj(Layer(weight), self.comm)
        both = [self._copy(proj.twin) for _ in range(count - 1)] + [proj.twin]
        full = exact_twin(weight)
        assert full is not None
        copies = [full] + [self._copy(full) for _ in range(max(1, count // self.world) - 1)]
        weights = [weight] + [weight.clone() for _ in range(1 if CUDA else 0)]
        copy = self.copy_gbps()
        for m in (m for m in ROWS if m <= 16):
            x = self.random(m, k, seed=m)
            want = main_proj(x, full)
            one, _ = self.time([partial(main_proj, x, twin) for twin in copies])
            self.row("draft main_proj", n, k, m, "fp8 GEMV, all columns on each rank", one)
            dense, _ = self.time([partial(torch.nn.functional.linear, x, w) for w in weights])
            self.row("draft main_proj", n, k, m, "bf16 linear, all columns on each rank", dense)
            calls = [partial(self.gathered, x, twin, proj) for twin in both]
            alone, _ = self.time([partial(main_proj, x, twin) for twin in both])
            split, last = self.time(calls)
            # The chunks of the sum depend on the shape of the weight, so all columns at once need not give these bits.
            same = [torch.cat(self._columns_of(x, full, proj), dim=1)] * len(last)
            wrong = self.differing([*last, proj(x)], [*same, same[0]])
            moved = both[0].nbytes + 2 * m * (k + both[0].codes.shape[1])
            gbps = moved / alone / 1e3
            facts = {"wrong": wrong, "whole_over_this": round(one / split, 3), "columns_only_us": round(alone, 3)}
            facts |= {"gemv_gbps": round(gbps, 1), "copy_gbps": round(copy, 1), "over_copy": round(gbps / copy, 3)}
            near = ((last[0].float() - want.float()).abs().max() / want.float().abs().mean()).item()
            self.row("draft main_proj", n, k, m, "split", split, **facts, from_all_columns=round(near, 5))

    def gathered(self, x: torch.Tensor, twin: Twin, proj: MainProj) -> torch.Tensor:
        """As MainProj does it, with a copy of its twin."""
        return self.comm.all_gather_columns(main_proj(x, twin), proj._split, label="layer_split")

    def _columns_of(self, x: torch.Tensor, full: Twin, proj: MainProj) -> list[torch.Tensor]:
        """What each rank's GEMV gives, computed here on cut twins."""
        split = proj._split
        cuts = [slice(start, start + size) for start, size in zip(split.starts, split.sizes, strict=True)]
        return [main_proj(x, Twin(full.codes[:, c].contiguous(), full.exponents[:, c].contiguous())) for c in cuts]

    def _copy(self, twin: Twin) -> Twin:
        return Twin(twin.codes.clone(), twin.exponents.clone())

    def copy_gbps(self) -> float:
        """Bytes read and written by a copy of 256 MiB, over its time."""
        source = torch.zeros((256 << 20) if CUDA else (1 << 20), dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        us, _ = self.time([partial(target.copy_, source)])
        return 2 * source.nbytes / us / 1e3


def main() -> None:
    bench = Bench()
    for n, k in SHAPES:
        bench.linear(n, k)
    bench.projection(*PROJ)
    if bench.rank == 0:
        block = environment(bench.world, "torchrun", "cuda" if CUDA else "cpu", CommSettings())
        block["transports"] = sorted(bench.comm.transports)
        with open(sys.argv[1], "w") as file:
            json.dump({"env": block, "rows": bench.rows}, file, indent=1)
        for row in bench.rows:
            if "whole_over_this" in row:
                print(
                    f"{row['layer']} {row['n']}x{row['k']} m={row['m']} {row['what']}: {row['p50_us']} us, "
                    f"whole/this {row['whole_over_this']}, wrong {row['wrong']}, {row.get('over_copy', '')}"
                )
        print(f"world {bench.world}: {len(bench.rows)} rows, wrong {bench.wrong}")
    bench.comm.barrier(label="layer_split:end")
    bench.comm.close()
    dist.destroy_process_group()
    if bench.wrong:
        raise SystemExit(f"{bench.wrong} elements differ")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
