"""Run by the engine's interpreter: prefill_sp on the real loop and layers of a release, on gloo ranks. Prints JSON."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
from sglang.srt.model_executor import model_runner  # noqa: F401  (a patched module: it must import)
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.models import deepseek_v4 as v4

from dsv41_dist.adapters import prefill_sp
from dsv41_dist.adapters._prefill_runtime import Options
from tests.engine import prefill_model as small
from tests.engine.split_ranks import bits, run_world, state_of


def layer_classes() -> dict[str, type]:
    """The layer that CUDA runs and the one that other platforms run; one class before 0.5.23."""
    if hasattr(v4, "DeepseekV4CudaDecoderLayer"):
        return {"cuda": v4.DeepseekV4CudaDecoderLayer, "platform": v4.DeepseekV4PlatformDecoderLayer}
    return {"platform": v4.DeepseekV4DecoderLayer}


def forward(
    model: Any, rows: int, tail: Any = None, requests: int = 1, prefix: int = 0, mode=ForwardMode.EXTEND
) -> dict:
    """One pass through the loop: the bytes of everything it gives, on this rank."""
    ids = (torch.arange(rows) * 5 + 3) % small.VOCAB
    x = small.draw(rows, small.STREAMS, small.HIDDEN, seed=rows).bfloat16()
    batch, backend = small.batch_of(rows, requests, mode), small.Backend(tail)
    captures = model.dspark_layers_to_capture is not None
    aux: Any = []
    if captures and hasattr(v4, "AuxHiddenStatePacker"):
        aux = v4.AuxHiddenStatePacker(len(model.dspark_layers_to_capture))
    for layer in model.layers:
        layer.self_attn.heights.clear()
        layer.mlp.heights.clear()
    before = x.clone()
    with torch.no_grad(), forward_context(ForwardContext(attn_backend=backend)):
        residual, pre, got_tail = model._forward_layers_hc_pre_from_prev(
            torch.arange(rows) + prefix, x, batch, ids, ids, captures, aux
        )
    assert torch.equal(x, before), "the loop's input was written"
    assert got_tail is tail
    collected = [] if not captures else list(aux) if isinstance(aux, list) else [aux.finalize()]
    return {
        "out": [bits(t).hex() for t in (residual, pre, *collected, *backend.source_rows)],
        "values": torch.cat([residual.float().flatten(), pre.float().flatten()]),
        "heights": sorted({h for layer in model.layers for h in (*layer.self_attn.heights, *layer.mlp.heights)}),
    }


def adapted(model: Any, **options: Any) -> Any:
    """Attach with these options; the runtime."""
    defaults = {"mode": "exact", "min_rows": 64, "wkv": True}
    prefill_sp.attach_model(model, state_of("prefill_sp"), Options(**{**defaults, **options}))
    return vars(model)[prefill_sp._SP]


def compare(which: str, options: dict, rows: int, **case: Any) -> dict:
    """Stock and sharded on the same input, in this order and on two passes (the first decides on wkv)."""
    build = {key: case.pop(key) for key in ("replicated", "late", "capture") if key in case}
    small_tail = case.pop("tail", None)
    tail = None if small_tail is None else small.tail_of(rows, case.get("requests", 1), small_tail)
    v4._is_cuda = which == "cuda"
    model = small.build(layer_classes()[which], **build)
    stock = forward(model, rows, tail, **case)
    runtime = adapted(model, **options)
    state = state_of("prefill_sp")
    fired = state.fired
    passes = [forward(model, rows, tail, **case) for _ in range(2)]
    return {
        "case": [which, rows, small_tail, *sorted(build), *sorted(case.items())],
        "equal": [one["out"] == stock["out"] for one in passes],
        "outputs": len(stock["out"]),
        "largest": max(float((one["values"] - stock["values"]).abs().max()) for one in passes),
        "heights": [stock["heights"], passes[1]["heights"]],
        "sharded": runtime.sharded,
        "stock": runtime.stock,
        "fired": state.fired - fired,
        "verdicts": {str(key): value for key, value in runtime._wkv._verdicts.items()},
        "note": state.notes[runtime._note],
        "more": state.notes[runtime._note + 1 :],
    }


CASES: list[dict[str, Any]] = [
    {"rows": 2048},
    {"rows": 4096},
    {"rows": 2052},
    {"rows": 256, "prefix": 512},
    {"rows": 256, "capture": (0, 2)},
    {"rows": 256, "replicated": True},
    {"rows": 256, "late": 2, "tail": 32},
    {"rows": 256, "late": 2, "tail": 64},  # as many rows as a shard
    {"rows": 256, "late": 2, "tail": 16, "requests": 4},
    {"rows": 256, "late": 2, "tail": 64, "capture": (1, 2), "prefix": 128},
    {"rows": 256, "late": 2, "tail": 16, "requests": 2, "capture": (0, 1, 3), "replicated": True},
]


def exact(rank, args):
    small.stand_ins()
    return [compare(which, {}, **dict(case)) for which in layer_classes() for case in CASES]


def one(rank, args):
    small.stand_ins()
    return [compare(which, {"compare": True}, rows=2052) for which in layer_classes()]


SCENES = {f.__name__: f for f in (exact, one)}


def main() -> None:
    out = {}
    for asked in sys.argv[1:]:
        name, _, size = asked.partition(":")
        out[asked] = run_world(int(size), SCENES[name])
    print(json.dumps(out))


if __name__ == "__main__":
    os.environ.setdefault("SGLANG_OPT_USE_TILELANG_MHC_POST", "0")
    main()
