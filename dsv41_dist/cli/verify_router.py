"""The router of a capped verify: the engine's kernel alone, with verify_cap's row copy behind it, and router_live's.

The engine's `moe_fused_gate` is a Triton kernel: this part needs a GPU and the published SGLang on PYTHONPATH, and says
by name what is missing otherwise. Inputs are those of V4.1's vision path, the fullest form of the call: float32 scores
of 384 experts, top 6 without groups, a second bias for image tokens, a padding bound, packed ids.
"""

from __future__ import annotations

import hashlib
import importlib
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..kernels.verify_cap import copy_rows, copy_rows_torch
from .timing import local_times

if TYPE_CHECKING:
    from .bench_verify import VerifyPlan

__all__ = ["EXPERTS", "HEADER", "TOP_K", "RouterAbsent", "Routers", "engine_routers", "line_of", "time_routers"]

# The V4.1 target's router, as the engine's own launcher names it (moe_fused_gate.py: N == 384 and K == 6).
EXPERTS, TOP_K = 384, 6
REPLAYS = 64  # compared before timing, each with other scores, live rows and padding
_GATE = "sglang.kernels.ops.moe.moe_fused_gate"
_IMAGE = 3  # the token id that takes the second bias
Routing = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # weights, ids, packed ids: [rows, TOP_K]
_PATHS = ("stock", "copy_all", "copy_half", "live_all", "live_half")

HEADER = (
    f"{'router':<26}{'requests':>9}{'stock us':>10}{'+ copy us: all, half live':>28}{'live us: all, half live':>26}"
    f"{'copy/live':>11}{'replays':>9}{'moved':>7}{'#wrong':>8}"
)


class RouterAbsent(Exception):
    """Why the router cannot be timed here."""


class Routers(NamedTuple):
    """stock: the engine's moe_fused_gate. live: the one made from its source, with `live` and `live_stride`."""

    stock: Callable[..., Any]
    live: Callable[..., Any]
    facts: dict[str, Any]


def engine_routers(device: str) -> Routers:
    """Both routers of the engine on PYTHONPATH. Raises RouterAbsent with one line that says what is missing."""
    if device != "cuda":
        raise RouterAbsent("the engine's router is a Triton kernel: it needs a CUDA device")
    return load_routers()


def load_routers() -> Routers:
    """Both routers from the engine that can be imported. Raises RouterAbsent."""
    from ..adapters._router_live_source import load

    try:
        engine, module = importlib.import_module("sglang"), importlib.import_module(_GATE)
    except Exception as error:  # the engine's import runs whatever the installed packages do
        raise RouterAbsent(f"{_GATE} cannot be imported: {type(error).__name__}: {error}") from error
    assert module.__file__ is not None
    source = Path(module.__file__).read_text("utf-8")
    release = engine.__version__
    try:
        made = load(source)
    except ValueError as error:
        raise RouterAbsent(f"router_live cannot be made from SGLang {release}: {error}") from error
    facts = {"release": release, "source": hashlib.sha256(source.encode()).hexdigest()[:16]}
    return Routers(module.moe_fused_gate, made.moe_fused_gate, facts)


class _Inputs(NamedTuple):
    """Fixed addresses, as a graph needs them. scores: float32 [rows, EXPERTS]. ids: int64 [rows]. in_use: int32 scalar.
    live: int32 [requests]."""

    scores: torch.Tensor
    bias: torch.Tensor
    alt: torch.Tensor
    ids: torch.Tensor
    in_use: torch.Tensor
    live: torch.Tensor

    def draw(self, gen: torch.Generator, stride: int, number: int) -> None:
        """Other scores with ties, tokens, live rows from 1 to stride; every other time one request is padding."""
        device, (rows, bs) = self.scores.device, (len(self.ids), len(self.live))
        self.scores.copy_(torch.randn(rows, EXPERTS, generator=gen, device=device))
        self.scores[:, 10] = self.scores[:, 11]
        self.ids.copy_(torch.randint(0, 5, (rows,), generator=gen, device=device))
        self.live.copy_(torch.randint(1, stride + 1, (bs,), generator=gen, device=device, dtype=torch.int32))
        self.in_use.fill_(max(1, bs - number % 2) * stride)


def time_routers(plan: VerifyPlan, routers: Routers) -> Iterator[dict[str, Any]]:
    """One line for each number of requests: microseconds of each path, and how many routed rows were wrong."""
    for bs in plan.requests:
        yield _line(plan, routers, bs)


def line_of(row: dict[str, Any]) -> str:
    copies = f"{row['copy_all_p50_us']:.2f}, {row['copy_half_p50_us']:.2f}"
    lives = f"{row['live_all_p50_us']:.2f}, {row['live_half_p50_us']:.2f}"
    return (
        f"{'moe_fused_gate':<26}{row['requests']:>9}{row['stock_p50_us']:>10.2f}{copies:>28}{lives:>26}"
        f"{row['copy_over_live']:>11.2f}{row['replays']:>9}{row['moved']:>7}{row['wrong']:>8}"
    )


def _line(plan: VerifyPlan, routers: Routers, bs: int) -> dict[str, Any]:
    stride = plan.drafts + 1
    rows = bs * stride
    gen = torch.Generator(plan.device).manual_seed(bs)
    bias, alt = (torch.randn(EXPERTS, generator=gen, device=plan.device) for _ in range(2))
    bias[10] = bias[11]
    given = _Inputs(
        scores=torch.empty(rows, EXPERTS, device=plan.device),
        bias=bias,
        alt=alt,
        ids=torch.empty(rows, dtype=torch.int64, device=plan.device),
        in_use=torch.empty((), dtype=torch.int32, device=plan.device),
        live=torch.empty(bs, dtype=torch.int32, device=plan.device),
    )
    given.draw(gen, stride, 0)
    moved, wrong = _compare(plan, routers, given, gen, stride)

    cuda = plan.device == "cuda"
    half = max(1, stride // 2)
    given.in_use.fill_(rows)
    found: dict[str, float] = {}
    for path in _PATHS:
        name, _, share = path.partition("_")
        given.live.fill_(half if share == "half" else stride)
        call = {
            "stock": lambda: _stock(routers, given),
            "copy": lambda: _copied(routers, given, stride),
            "live": lambda: _live(routers, given, stride),
        }[name]
        times = local_times(call, plan.iterations, plan.graphs, cuda)
        found[f"{path}_p50_us"], found[f"{path}_p99_us"] = (
            round(value, 3) for value in (statistics.median(times), max(times))
        )
    return {
        "op": "verify router", "requests": bs, "rows": rows, "experts": EXPERTS, "top_k": TOP_K, "stride": stride,
        "half": half, "graph": plan.graphs, **found,
        "copy_over_live": round(found["copy_half_p50_us"] / found["live_half_p50_us"], 3),
        "replays": REPLAYS, "decided": REPLAYS * rows, "moved": moved, "wrong": wrong,
    }  # fmt: skip


def _call(function: Callable[..., Any], given: _Inputs, **extra: Any) -> Routing:
    """A router on the vision path's arguments."""
    packed = torch.empty(len(given.ids), TOP_K, dtype=torch.int32, device=given.scores.device)
    weights, ids = function(
        given.scores, given.bias, topk=TOP_K, scoring_func="sqrtsoftplus", renormalize=True,
        renormalize_epsilon=1e-20, sqrtsoftplus_log1p=True, routed_scaling_factor=1.5,
        apply_routed_scaling_factor_on_output=True, bias_alt=given.alt, input_ids=given.ids, bias_alt_token_id=_IMAGE,
        num_token_non_padded=given.in_use, packed_out=packed, **extra,
    )  # fmt: skip
    return weights, ids, packed


def _stock(routers: Routers, given: _Inputs) -> Routing:
    return _call(routers.stock, given)


def _copied(routers: Routers, given: _Inputs, stride: int) -> Routing:
    weights, ids, packed = _call(routers.stock, given)
    copy_rows(weights, ids, packed, given.live, stride, given.in_use)
    return weights, ids, packed


def _live(routers: Routers, given: _Inputs, stride: int) -> Routing:
    return _call(routers.live, given, live=given.live, live_stride=stride)


def _compare(plan: VerifyPlan, routers: Routers, given: _Inputs, gen: torch.Generator, stride: int) -> tuple[int, int]:
    """(rows that the live lengths routed otherwise than stock, wrong rows) over REPLAYS replays of one graph of both
    paths. A row is wrong when a byte of its weights, ids or packed ids is not that of the stock router and the row copy
    in the same graph, or theirs not that of the stock router and the copy's plain-torch twin, run eagerly.
    """
    replay = _replayed(lambda: (_copied(routers, given, stride), _live(routers, given, stride)), plan.device == "cuda")
    moved = wrong = 0
    for number in range(REPLAYS):
        given.draw(gen, stride, number)
        want, got = replay()
        plain = _stock(routers, given)
        weights, ids, packed = twin = plain[0].clone(), plain[1].clone(), plain[2].clone()
        copy_rows_torch(weights, ids, packed, given.live, stride, given.in_use)
        moved += int(_other(got, plain).sum())
        wrong += int((_other(got, want) | _other(want, twin)).sum())
    return moved, wrong + (moved == 0)  # where no row moved, the comparison shows nothing


def _replayed(step: Callable[[], Any], cuda: bool) -> Callable[[], Any]:
    """`step` captured into a CUDA graph, what it gave being rewritten by each call; without a GPU `step` itself."""
    if not cuda:
        return step
    step()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()

    def replay() -> Any:
        graph.replay()
        return out

    return replay


def _other(left: Routing, right: Routing) -> torch.Tensor:
    """bool [rows]: rows in which a byte differs."""
    differ = [(a.view(torch.uint8) != b.view(torch.uint8)).any(-1) for a, b in zip(left, right, strict=True)]
    return torch.stack(differ).any(0)
