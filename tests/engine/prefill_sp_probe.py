"""Run by the engine's interpreter: prefill_sp on the real loop and layers of a release, on gloo ranks. Prints JSON."""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
from collections.abc import Callable
from hashlib import sha256
from tempfile import TemporaryDirectory
from typing import Any

import sglang
import torch
from sglang.srt.model_executor import model_runner  # noqa: F401  (a patched module: it must import)
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.models import deepseek_v4 as v4

from dsv41_dist.adapters import prefill_sp
from dsv41_dist.adapters._prefill_chunk import Chunk
from dsv41_dist.adapters._prefill_debug import RowOp
from dsv41_dist.adapters._prefill_runtime import Options
from dsv41_dist.adapters.prefill_sp import PrefillSp
from tests.engine import prefill_model as small
from tests.engine.split_ranks import bits, run_world, runner, state_of


def layer_classes() -> dict[str, type]:
    """The layer that CUDA runs and the one that other platforms run; one class before 0.5.23."""
    if hasattr(v4, "DeepseekV4CudaDecoderLayer"):
        return {"cuda": v4.DeepseekV4CudaDecoderLayer, "platform": v4.DeepseekV4PlatformDecoderLayer}
    return {"platform": v4.DeepseekV4DecoderLayer}


def loop(model: Any, rows: int, tail: Any = None, requests: int = 1, prefix: int = 0, mode=ForwardMode.EXTEND) -> tuple:
    """One pass through the loop: (residual, pre, captured, what the source layer of the tail writes)."""
    ids = (torch.arange(rows) * 5 + 3) % small.VOCAB
    x = small.draw(rows, small.STREAMS, small.HIDDEN, seed=rows).bfloat16()
    before = x.clone() if small.HIDDEN < 1000 else None
    batch, backend = small.batch_of(rows, requests, mode), small.Backend(tail)
    captures = model.dspark_layers_to_capture is not None
    aux: Any = []
    if captures and hasattr(v4, "AuxHiddenStatePacker"):
        aux = v4.AuxHiddenStatePacker(len(model.dspark_layers_to_capture))
    with torch.no_grad(), forward_context(ForwardContext(attn_backend=backend)):
        residual, pre, got_tail = model._forward_layers_hc_pre_from_prev(
            torch.arange(rows) + prefix, x, batch, ids, ids, captures, aux
        )
    assert before is None or torch.equal(x, before), "the loop's input was written"
    assert got_tail is tail
    collected = [] if not captures else list(aux) if isinstance(aux, list) else [aux.finalize()]
    return residual, pre, *collected, *backend.source_rows


def forward(model: Any, rows: int, tail: Any = None, **case: Any) -> dict[str, Any]:
    """One pass through the loop: digests of everything it gives, on this rank, and the rows that sublayers saw."""
    for layer in model.layers:
        layer.self_attn.heights.clear()
        layer.mlp.heights.clear()
    out = loop(model, rows, tail, **case)
    return {
        "out": [sha256(bits(t.cpu())).hexdigest() for t in out],
        "values": torch.cat([t.float().flatten() for t in out[:2]]),
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
    {"rows": 252, "prefix": 37, "capture": (0, 2)},
    {"rows": 256, "replicated": True},
    {"rows": 256, "late": 2, "tail": 32},
    {"rows": 256, "late": 2, "tail": 64},  # as many rows as a shard has
    {"rows": 256, "late": 2, "tail": 16, "requests": 4},
    {"rows": 256, "late": 2, "tail": 64, "capture": (1, 2), "prefix": 128},
    {"rows": 256, "late": 2, "tail": 16, "requests": 2, "capture": (0, 1, 3), "replicated": True},
]


def exact(rank, args):
    return [compare(which, {}, **dict(case)) for which in layer_classes() for case in CASES]


def few(rank, args):
    """Another number of ranks: 252 rows divide over 2 and 3."""
    return [compare(which, {}, **dict(case)) for which in layer_classes() for case in ({"rows": 252}, dict(CASES[4]))]


def other_modes(rank, args):
    """The reduce-scatter, the collectives alone, and without Engram's projection; compared with the all-reduce."""
    plain, late = {"rows": 252, "capture": (0, 2)}, CASES[10]
    asked = [({"mode": "fast"}, plain), ({"mode": "fast", "wkv": False}, late), ({"mode": "comm"}, late)]
    out = []
    for which in layer_classes():
        out += [{**compare(which, {**options, "compare": True}, **dict(case)), **options} for options, case in asked]
    return out


def debug(rank, args):
    """compare over whole chunks, first of equal ops, then with one bit of one op off on one rank, which is dumped."""
    equal = [compare(which, {"compare": True}, **dict(CASES[k])) for which in layer_classes() for k in (4, 10)]
    op = row_op("_combine" if hasattr(v4, "mhc") else "_hc_combine")
    with TemporaryDirectory() as folder:
        if rank == 1:
            sharded, op.sharded = op.sharded, lambda *a, **k: flipped(sharded(*a, **k))
        off = compare("platform", {"compare": True, "fingerprints": True, "dump": folder, "debug_chunks": 1}, rows=256)
        if rank == 1:
            op.sharded = sharded
        dumps = {name: sorted(torch.load(f"{folder}/{name}")) for name in sorted(os.listdir(folder))}
    return {"equal": equal, "off": off, "dumps": dumps}


def row_op(name: str) -> RowOp:
    """The adapter's own object behind a wrapped engine function."""
    owner = v4.mhc if hasattr(v4, "mhc") else v4.DeepseekV4DecoderLayer
    cells = [cell.cell_contents for cell in vars(owner)[name].__closure__]
    return next(cell for cell in cells if isinstance(cell, RowOp))


def flipped(x: torch.Tensor) -> torch.Tensor:
    """x with the lowest bit of its first byte turned."""
    x = x.clone()
    x.view(-1).view(torch.uint8)[0] ^= 1
    return x


def one_rank_is_off(rank, args):
    """Engram's projection of a shard differs by a bit on rank 2: the whole form on every rank, for that size only."""
    v4._is_cuda = False
    model = small.build(layer_classes()["platform"])
    stock = {rows: forward(model, rows) for rows in (256, 252)}
    runtime, state = adapted(model), state_of("prefill_sp")
    wkv = model.layers[small.ENGRAM_LAYER].engram.wkv
    apply, heights = wkv.quant_method.apply, []

    def off(layer, x, bias=None):
        heights.append(x.shape[0])
        out = apply(layer, x, bias)
        return flipped(out) if rank == 2 and x.shape[0] == 64 else out

    wkv.quant_method.apply = off
    equal = [forward(model, rows)["out"] == stock[rows]["out"] for rows in (256, 256, 252, 252)]
    verdicts = {str(key): value for key, value in runtime._wkv._verdicts.items()}
    return {"equal": equal, "verdicts": verdicts, "heights": heights, "notes": state.notes[runtime._note + 1 :]}


def never_enters(rank, args):
    """What is no eager prefill of the target, or too small, or does not divide: bytes of stock, nothing sharded."""
    from sglang.srt.layers import logits_processor
    from sglang.srt.model_executor.runner_utils import capture_mode

    v4._is_cuda = False
    model = small.build(layer_classes()["platform"], capture=(1,))
    modes = [mode for mode in ForwardMode if not mode.is_extend_without_speculative()]
    speculative = {mode.name: forward(model, 256, mode=mode) for mode in modes}
    plain = {rows: forward(model, rows) for rows in (256, 254, 60)}
    runtime, state = adapted(model), state_of("prefill_sp")
    fired, out = state.fired, {}

    def same(name, result, stock):
        out[name] = [result["out"] == stock["out"], state.fired - fired, runtime.sharded, dict(runtime.stock)]

    for mode in modes:
        same(mode.name, forward(model, 256, mode=mode), speculative[mode.name])
    capture_mode.is_capture_mode = True
    same("captured", forward(model, 256), plain[256])
    capture_mode.is_capture_mode = False
    with logits_processor.autotune_dummy_run_mode(run_lm_head=False):
        same("tuning run", forward(model, 256), plain[256])
    same("254 rows", forward(model, 254), plain[254])
    same("60 rows", forward(model, 60), plain[60])
    # A layer outside the target's loop, as a draft's stages are: its wrapped functions see no chunk.
    same("a prefill after all", forward(model, 256), plain[256])
    same(
        "and a draft's layer", draft_stage(model), {"out": draft_stage(small.build(layer_classes()["platform"]))["out"]}
    )
    return out


def draft_stage(model: Any) -> dict:
    """The sublayers of a layer, called as a draft's stage calls them: not by the target's loop."""
    layer, rows = model.layers[0], 256
    batch, ids = small.batch_of(rows), torch.arange(rows) % small.VOCAB
    x = small.draw(rows, small.HIDDEN, seed=5).bfloat16()
    with torch.no_grad():
        y = layer.self_attn(x=x, positions=torch.arange(rows), forward_batch=batch)
        z = layer._run_moe_ffn_dp_sync(y, batch, input_ids=ids, input_ids_global=ids)
    return {"out": [sha256(bits(t)).hexdigest() for t in (y, z)]}


def choices(rank, args):
    """Kernel choices in an open chunk: those of the whole chunk for a shard, their own for other row counts."""
    from dsv41_dist.adapters._prefill_rewrite import by_logical_rows
    from dsv41_dist.comm import RowScope

    v4._is_cuda = False
    runtime = adapted(small.build(layer_classes()["platform"]))
    tile = small.kernels._block_m_for
    own, seen = tile.__wrapped__, []
    for rows in (16, 64, 384, 2048, 4096, 8192):
        chunk = Chunk(runtime, RowScope(runtime.comm, rows, "exact"), False, None)
        held = chunk.scope.held
        other = held + 1
        with chunk.open():
            inside = [tile(held), tile(other)]
            with chunk.whole():
                inside.append(tile(held))
        seen.append(inside == [own(rows), own(other), own(held)] and tile(held) == own(held))
    rewritten = {}
    for target in PrefillSp.targets:
        name = target.qualname.rpartition(".")[2]
        known = {
            **prefill_sp._ROW_OPS.get(target.module, {}),
            **dict.fromkeys(prefill_sp._LAUNCHERS.get(target.module, ())),
        }
        if target.qualname in known and target.is_for(sglang.__version__):
            module = importlib.import_module(target.module)
            owner = functools.reduce(getattr, target.qualname.split(".")[:-1], module)
            rewritten[name] = by_logical_rows(vars(owner)[name].__wrapped__)[1]
    return {"tiles": seen, "rewritten": rewritten}


def declines(rank, args):
    """Reasons that hold for a whole model; a draft is passed over in silence."""
    from types import SimpleNamespace

    v4._is_cuda = False
    model, state, out = small.build(layer_classes()["platform"]), state_of("prefill_sp"), {}

    def tried(name, target=model, **changed):
        before = len(state.notes)
        vars(target).pop(prefill_sp._SP, None)
        prefill_sp.attach(runner(args, target, **changed), state)
        out[name] = [state.notes[before:], any(prefill_sp._SP in vars(m) for m in target.modules())]

    tried("lora", server_args=SimpleNamespace(enable_lora=True, lora_paths=None))
    tried("draft", is_draft_worker=True)
    tried("another model", target=torch.nn.Linear(2, 2))
    model.hc_pre_from_prev_sublayer = False
    tried("V4")
    model.hc_pre_from_prev_sublayer = True
    model.pp_group.world_size = 2
    tried("stages")
    model.pp_group.world_size = 1
    tried("attached", target=torch.nn.ModuleList([model]))
    return out


SCENES = {f.__name__: f for f in (exact, few, other_modes, debug, one_rank_is_off, never_enters, choices, declines)}


def run(rank: int, args: Any, names: list[str]) -> dict[str, Any]:
    small.stand_ins()
    return {name: SCENES[name](rank, args) for name in names}


def main(run: Callable[[int, Any, list[str]], dict[str, Any]]) -> None:
    """Arguments: SCENE:RANKS. Scenes of as many ranks run one after another in one group, by `run`."""
    out: dict[str, list[Any]] = {}
    sizes: dict[str, list[str]] = {}
    for asked in sys.argv[1:]:
        name, _, size = asked.partition(":")
        sizes.setdefault(size, []).append(name)
    for size, names in sizes.items():
        ranks = run_world(int(size), functools.partial(run, names=names))
        out |= {f"{name}:{size}": [one[name] for one in ranks] for name in names}
    print(json.dumps(out))


if __name__ == "__main__":
    os.environ.setdefault("SGLANG_OPT_USE_TILELANG_MHC_POST", "0")
    main(run)
