"""Run by the engine's interpreter: replicated_split on the real ReplicatedLinear, on gloo ranks. Prints JSON."""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace

import torch
from sglang.srt.layers.linear import ReplicatedLinear
from sglang.srt.model_executor import model_runner  # noqa: F401  (a patched module: it must import)

from dsv41_dist.adapters import replicated_split
from tests.engine import split_fp8
from tests.engine.split_ranks import bits, run_world, runner, state_of, tree

ATTN = "model.layers.{}.self_attn.wqkv_a"


def linear(n: int, k: int, dtype: torch.dtype, bias: bool = False, skip: bool = False) -> ReplicatedLinear:
    layer = ReplicatedLinear(k, n, bias=bias, skip_bias_add=skip, params_dtype=dtype)
    layer.weight.data.normal_(0, 0.05)
    if bias:
        layer.bias.data.normal_(0, 1)
    for parameter in layer.parameters():
        parameter.requires_grad_(False)
    return layer


def split_of(layer):
    return vars(layer).get(replicated_split._SPLIT)


def drive(name: str, layer, rows: list[int], make=None) -> dict:
    """Each row count twice (the deciding call, then the decided one) against the stock forward."""
    stock = ReplicatedLinear.forward.__wrapped__
    state, k = state_of("replicated_split"), layer.input_size
    out = {"name": name, "rows": rows, "equal": [], "fired": [], "variants": [], "bias": []}
    for m in rows:
        gen = torch.Generator().manual_seed(m)
        x = torch.randn(m, k, generator=gen).to(layer.params_dtype)
        x = x if make is None else make(x)
        want, want_bias = stock(layer, x)
        first, _ = layer(x)
        before = state.fired
        second, got_bias = layer(x)
        out["equal"].append(bits(first) == bits(want) == bits(second) and second.shape == want.shape)
        out["fired"].append(state.fired - before)
        out["bias"].append(got_bias is want_bias)
    split = split_of(layer)
    out["variants"] = sorted(set(split._variants.values())) if split else None
    return out


def attach(args, layers: dict, suffixes: str, **env: str) -> list[str]:
    """Attach, and give the notes that this added."""
    os.environ.update({"DSV41_REPLICATED_SPLIT": suffixes, **env})
    state = state_of("replicated_split")
    before = len(state.notes)
    replicated_split.attach(runner(args, tree(layers)), state)
    return state.notes[before:]


def plain(rank, args):
    """Widths that split 4/4/3/3, evenly and not at all; dtypes; biases; rows above MAX_M."""
    layers = {
        ATTN.format(0): linear(1792, 256, torch.bfloat16),
        ATTN.format(1): linear(1792, 256, torch.float16),
        ATTN.format(2): linear(1792, 256, torch.float32),
        ATTN.format(3): linear(1536, 256, torch.bfloat16, bias=True),
        ATTN.format(4): linear(1792, 256, torch.bfloat16, bias=True, skip=True),
        ATTN.format(5): linear(256, 64, torch.bfloat16),
        ATTN.format(6): linear(1800, 64, torch.bfloat16),
        "model.layers.7.engram.wkv": linear(1792, 256, torch.bfloat16),
        "model.layers.7.self_attn.wkv": linear(1792, 256, torch.bfloat16),
        "model.layers.7.self_attn.indexer.wqkv_a": linear(1792, 256, torch.bfloat16),
    }
    results, notes = [], {}
    for compact in ("0", "1"):
        for window in ("0", "1"):
            gates = {"DSV41_SPLIT_COMPACT_GATHER": compact, "DSV41_REPLICATED_SPLIT_WINDOW": window}
            notes = attach(args, layers, "wqkv_a,engram.wkv,none_such", **gates, DSV41_REPLICATED_SPLIT_MAX_M="20")
            for name, layer in layers.items():
                results.append({**gates, **drive(name, layer, [1, 6, 17, 21])})
    return {"results": results, "notes": notes}


def published_shape(rank, args):
    layers = {ATTN.format(0): linear(1792, 5120, torch.bfloat16)}
    notes = attach(args, layers, "wqkv_a", DSV41_REPLICATED_SPLIT_MAX_M="96", DSV41_SPLIT_COMPACT_GATHER="1")
    rows = [1, 6, 16, 48, 96, 97]
    return {"results": [drive(name, layer, rows) for name, layer in layers.items()], "notes": notes}


def one_rank_is_off(rank, args):
    """Rank 2's kernel gives one bit more in one element, for the narrow shape only."""
    layer = linear(1792, 64, torch.bfloat16)
    stock_apply = layer.quant_method.apply
    if rank == 2:

        def apply(part, x, bias=None):
            y = stock_apply(part, x, bias)
            if isinstance(part, SimpleNamespace):
                y.view(torch.int16)[-1, 0] += 1
            return y

        layer.quant_method.apply = apply
    state = state_of("replicated_split")
    attach(args, {ATTN.format(0): layer}, "wqkv_a")
    result = drive("spoiled", layer, [6, 7])
    return {"result": result, "notes": state.notes}


def one_rank_fails(rank, args):
    """Rank 1's slice raises in the checks of the columns, at first and on a probe, and where it is about to gather."""
    out = {}
    for at in (1, 3, 5):
        layer = linear(1792, 64, torch.bfloat16)
        stock_apply, calls = layer.quant_method.apply, []

        def apply(part, x, bias=None, at=at, stock_apply=stock_apply, calls=calls):
            if isinstance(part, SimpleNamespace):
                calls.append(part)
                if rank == 1 and len(calls) == at:
                    raise MemoryError("no room for the slice")
            return stock_apply(part, x, bias)

        layer.quant_method.apply = apply
        state = state_of("replicated_split")
        attach(args, {ATTN.format(0): layer}, "wqkv_a")
        out[at] = {**drive("fails", layer, [6]), "note": state.notes[-1]}
    return out


def capture(rank, args):
    """In a capture a row count that is not decided is stock, one that is decided is split; nothing is voted."""
    layer = linear(1792, 64, torch.bfloat16)
    attach(args, {ATTN.format(0): layer}, "wqkv_a")
    split, state = split_of(layer), state_of("replicated_split")
    x = {m: torch.randn(m, 64, generator=torch.Generator().manual_seed(m)).bfloat16() for m in (3, 4)}
    layer(x[3])
    # A CPU has no stream that captures; the adapter asks torch, so torch is made to say so, of a tensor that says it
    # is on a GPU.
    seen = {}
    real = torch.cuda.is_current_stream_capturing
    torch.cuda.is_current_stream_capturing = lambda: True
    comm_is_capturing = []
    agree = split._checks.comm.agreement.agree
    split._checks.comm.agreement.agree = lambda *a, **k: comm_is_capturing.append(a) or agree(*a, **k)
    try:
        for m in (3, 4):
            before = state.fired
            y, _ = layer(x[m].as_subclass(OnGpu))
            want, _ = ReplicatedLinear.forward.__wrapped__(layer, x[m])
            seen[m] = [state.fired - before, bits(torch.Tensor(y).bfloat16()) == bits(want)]
    finally:
        torch.cuda.is_current_stream_capturing = real
        split._checks.comm.agreement.agree = agree
    return {"seen": seen, "votes": len(comm_is_capturing)}


class OnGpu(torch.Tensor):
    """A CPU tensor that says it is on a GPU."""

    is_cuda = True

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def reloaded(rank, args):
    """A weight update in place needs nothing; one that puts another tensor there is decided again."""
    layer = linear(1792, 64, torch.bfloat16)
    attach(args, {ATTN.format(0): layer}, "wqkv_a")
    out = {"before": drive("before", layer, [5])}
    layer.weight.data.copy_(torch.randn(1792, 64))
    out["in place"] = drive("in place", layer, [5])
    out["generation in place"] = split_of(layer)._generation
    layer.weight = torch.nn.Parameter(torch.randn(1792, 64).bfloat16(), requires_grad=False)
    out["replaced"] = drive("replaced", layer, [5])
    out["generation replaced"] = split_of(layer)._generation
    return out


def declines(rank, args):
    """Reasons that hold for a whole runner, for a layer, and on one rank only."""
    from sglang.srt import runtime_context

    out = {}
    layers = {ATTN.format(0): linear(1792, 64, torch.bfloat16)}
    state = state_of("replicated_split")

    def tried(name, **changed):
        before = len(state.notes)
        replicated_split.attach(runner(args, tree(layers), **changed), state)
        out[name] = [state.notes[before:], split_of(layers[ATTN.format(0)]) is not None]

    os.environ["DSV41_REPLICATED_SPLIT"] = "wqkv_a"
    tried("lora", server_args=SimpleNamespace(enable_lora=True, lora_paths=None))
    tried("late load", startup_weight_load=object())
    tried("draft", is_draft_worker=True)
    real = runtime_context.get_parallel  # the real object refuses a width that the group was not built with
    runtime_context.get_parallel = lambda: SimpleNamespace(tp_size=2, attn_dp_size=2, attn_cp_size=1)
    tried("attention DP")
    runtime_context.get_parallel = real
    if rank == 1:
        layers[ATTN.format(0)].extra = torch.nn.Parameter(torch.zeros(1))
    tried("one rank")
    return out


def fp8(rank, args):
    """Block fp8 and MXFP8 layers of the real Fp8LinearMethod, with each input that they take."""
    results = []
    notes = []
    cases = {
        "block 32": (split_fp8.block_layer(1792, 64), [None, split_fp8.pair_input]),
        "block 128": (split_fp8.block_layer(1792, 128, block=128), [None]),
        "mxfp8": (split_fp8.mxfp8_layer(1792, 96), [None, split_fp8.pair_input, split_fp8.swizzled_input]),
    }
    for window in ("0", "1"):
        gates = {"DSV41_REPLICATED_SPLIT_WINDOW": window, "DSV41_SPLIT_COMPACT_GATHER": "1"}
        for case, (layer, makes) in cases.items():
            for make in makes:
                notes += attach(args, {ATTN.format(0): layer}, "wqkv_a", **gates)
                one = drive(case, layer, [1, 6, 17], make)
                results.append({**one, "input": make.__name__ if make else "plain", "kind": split_of(layer).kind.name})
    # The engine's own Triton kernel, in the interpreter; the input is quantized already, which is a CUDA kernel's work.
    layer = split_fp8.block_layer(640, 64)
    split_fp8.real_block_gemm(layer)
    attach(args, {ATTN.format(0): layer}, "wqkv_a", **gates)
    results.append({**drive("real kernel", layer, [1, 6], split_fp8.pair_input), "input": "pair_input"})
    # Scales that are moved, as a wrong slice would: the check must see it.
    layer = split_fp8.mxfp8_layer(1792, 96)
    attach(args, {ATTN.format(0): layer}, "wqkv_a")
    flat = split_of(layer)._part.weight_scale_inv_swizzled
    flat.data = flat.data.roll(1 if rank == 1 else 0)
    wrong = drive("moved", layer, [6])
    return {"results": [*results, wrong], "notes": notes}


SCENES = {
    f.__name__: f for f in (plain, published_shape, one_rank_is_off, one_rank_fails, capture, reloaded, declines, fp8)
}


def main() -> None:
    out = {}
    for asked in sys.argv[1:]:
        name, _, size = asked.partition(":")
        out[asked] = run_world(int(size), SCENES[name])
    print(json.dumps(out))


main()
