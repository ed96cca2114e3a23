"""Run by the engine's interpreter: the router part of `bench verify` on the installed source. Prints JSON.

Only what a CPU lacks is stood in for: libdevice, and programmatic launch. Graphs are plain calls here."""

from __future__ import annotations

import json
import time

import triton.language as tl
from sglang.kernels.ops.moe import moe_fused_gate as stock_module

from dsv41_dist.cli import verify_router
from dsv41_dist.cli.bench_verify import plan_verify

REPLAYS = 2


class MathByTriton:
    exp = staticmethod(lambda x: tl.exp(x))
    sqrt = staticmethod(lambda x: tl.sqrt(x))
    log1p = staticmethod(lambda x: tl.log(1.0 + x))


def plan():
    return plan_verify(
        vocab="3", drafts="5", temperatures="1", agreements="0.5", taus="1", caps="2", pairs="1", drawn_at="1",
        device="cpu", requests="1", kernel_vocab="50", iterations="1", graphs=None, json_file=None, plot_file=None,
    )  # fmt: skip


def once(call, *_):
    """A time from one call: the interpreter takes long, and its times say nothing."""
    start = time.perf_counter()
    call()
    return [(time.perf_counter() - start) * 1e6]


def main() -> None:
    verify_router.REPLAYS, verify_router.local_times = REPLAYS, once
    routers = verify_router.load_routers()
    for function in (routers.stock, routers.live):
        names = function.__globals__ if "libdevice" in function.__globals__ else function.__wrapped__.__globals__
        names["libdevice"], names["is_arch_support_pdl"] = MathByTriton, lambda: False
    assert routers.stock is stock_module.moe_fused_gate
    rows = list(verify_router.time_routers(plan(), routers))
    deaf = routers._replace(live=lambda *args, live, live_stride, **kwargs: routers.stock(*args, **kwargs))
    wrong = list(verify_router.time_routers(plan(), deaf))
    print(json.dumps({"facts": routers.facts, "rows": rows, "deaf": wrong}))


main()
