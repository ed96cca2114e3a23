"""Run by the engine's interpreter: prefill_sp's fp8 gathers on the real loop, layers, attention and quantized
projections of a release, on gloo ranks. Prints JSON."""

from __future__ import annotations

import functools
import os
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.quantization import fp8_utils
from sglang.srt.models import deepseek_v4 as v4

from dsv41_dist.adapters._prefill_fp8 import form_of
from tests.engine import prefill_fp8_model as fp8
from tests.engine import prefill_model as small
from tests.engine import prefill_sp_probe as sp
from tests.engine.split_ranks import state_of

READS = {2: "compressor", 3: "indexer"}


def built(which: str, kind: str = "powers", fused: bool = True, reads: dict | None = None, **more: Any) -> Any:
    fp8.Attention.kind, fp8.Attention.fused = kind, fused
    fp8.Attention.reads = READS if reads is None else reads
    v4._is_cuda = which == "cuda"
    return small.build(sp.layer_classes()[which], **more)


class Traffic:
    """Bytes this rank sent into the gathers of attention's rows while open, by dtype."""

    def __init__(self, runtime: Any) -> None:
        self.comm, self.sent = runtime.comm, {}

    def __enter__(self) -> dict[str, int]:
        self.all_gather = self.comm.all_gather

        def counted(x, dim=0, *, out=None, label):
            if label == "prefill_sp:attn":
                name = str(x.dtype).removeprefix("torch.")
                self.sent[name] = self.sent.get(name, 0) + x.nbytes
            return self.all_gather(x, dim, out=out, label=label)

        self.comm.all_gather = counted
        return self.sent

    def __exit__(self, *_: Any) -> None:
        self.comm.all_gather = self.all_gather


def passed(model: Any, rows: int, runtime: Any, **case: Any) -> dict:
    """One pass: what was sent for attention's rows, and what the release's forward was handed."""
    fp8.calls.clear()
    with Traffic(runtime) as sent:
        out = sp.forward(model, rows, **case)["out"]
    handed = [
        "bf16" if pair is None else f"{type(pair).__name__}{' NaN' if bool(x.isnan().all()) else ''} {x.stride()[0]}"
        for x, pair in fp8.calls
    ]
    return {"out": out, "sent": dict(sorted(sent.items())), "handed": handed}


def compared(
    which: str, kind: str, rows: int, options: dict | None = None, tail: int | None = None, **more: Any
) -> dict:
    """Stock, then sharded with fp8 gathers: the pass that decides, and one after it."""
    model = built(which, kind, **more)
    window = None if tail is None else small.tail_of(rows, 1, tail)
    stock = sp.forward(model, rows, window)
    runtime, state = sp.adapted(model, fp8=True, **(options or {})), state_of("prefill_sp")
    deciding, later = (passed(model, rows, runtime, tail=window) for _ in range(2))
    gathers = runtime.fp8
    return {
        "case": [which, kind, rows],
        "equal": [one["out"] == stock["out"] for one in (deciding, later)],
        "sent": [deciding["sent"], later["sent"]],
        "handed": [deciding["handed"], later["handed"]],
        "verdicts": sorted(gathers.check._verdicts.values()),
        "counts": [gathers.gathers, gathers.sent, gathers.in_bf16],
        "kept": gathers.kept,
        "notes": state.notes[runtime._note :],
    }


def exact(rank, args):
    out = [compared(which, "powers", 256) for which in sp.layer_classes()]
    out.append(compared("platform", "fp32", 64))
    out.append(compared("platform", "powers", 64, fused=False, reads={0: "indexer"}))
    out.append(compared("platform", "powers", 256, late=2, tail=32, reads={2: "compressor"}))
    return out


def few(rank, args):
    """Two ranks; with MXFP8 shards of 128 rows, whose scales are whole tiles, and of 64, whose are not."""
    cases = [(which, "powers", 128) for which in sp.layer_classes()]
    return [compared(*case) for case in (*cases, ("platform", "mxfp8", 256), ("platform", "mxfp8", 128))]


def modes(rank, args):
    """The reduce-scatter; and `compare`, which runs the projections of bf16 rows beside those of fp8 rows."""
    fast = compared("platform", "powers", 128, {"mode": "fast", "compare": True})
    del fast["equal"]  # a reordered sum
    looked = compared("platform", "powers", 128, {"compare": True})
    # Once the verdict is in, one bit on one rank.
    model = built("platform")
    runtime, state = sp.adapted(model, fp8=True, compare=True), state_of("prefill_sp")
    sp.forward(model, 128)
    if rank == 1:
        method = model.layers[1].self_attn.wqkv_a.quant_method
        method.apply = flipped_for_pairs(method.apply)
    sp.forward(model, 128)
    off = next(note for note in state.notes[runtime._note :] if note.startswith("compare"))
    return {"fast": fast, "compare": looked, "off": off}


def flipped_for_pairs(apply: Any) -> Any:
    """A projection whose output for pre-quantized input has one bit turned."""
    return lambda layer, x, bias=None: (
        sp.flipped(apply(layer, x, bias)) if isinstance(x, tuple) else apply(layer, x, bias)
    )


def one_rank_is_off(rank, args):
    """A bit of one rank's projection in one layer at one size: bf16 on every rank for that, and fp8 for the rest."""
    model = built("platform", reads={})
    stock = {rows: sp.forward(model, rows)["out"] for rows in (128, 64)}
    runtime, state = sp.adapted(model, fp8=True), state_of("prefill_sp")
    method = model.layers[1].self_attn.wqkv_a.quant_method
    apply = method.apply
    if rank == 2:
        method.apply = flipped_for_pairs(apply)
    first = [passed(model, 128, runtime) for _ in range(2)]
    method.apply = apply
    other = [passed(model, size, runtime) for size in (64, 64, 128)]
    return {
        "equal": [one["out"] == stock[size] for one, size in zip(first + other, (128, 128, 64, 64, 128), strict=True)],
        "sent": [one["sent"] for one in first + other],
        "verdicts": {str(key): value for key, value in runtime.fp8.check._verdicts.items()},
        "kept": runtime.fp8.kept,
        "notes": state.notes[runtime._note :],
    }


def one_rank_cannot_round(rank, args):
    """The quantizer raises on rank 1 at the first chunk: nobody waits in a gather, and all stay with bf16."""
    model = built("platform")
    stock = sp.forward(model, 128)["out"]
    runtime, state = sp.adapted(model, fp8=True), state_of("prefill_sp")
    quantize = fp8_utils.sglang_per_token_group_quant_fp8

    def broken(x, *rest, **more):
        if x.shape[0] == 32:
            raise RuntimeError("no kernel for this device")
        return quantize(x, *rest, **more)

    if rank == 1:
        fp8_utils.sglang_per_token_group_quant_fp8 = broken
    passes = [passed(model, 128, runtime) for _ in range(2)]
    fp8_utils.sglang_per_token_group_quant_fp8 = quantize
    return {
        "equal": [one["out"] == stock for one in passes],
        "sent": [one["sent"] for one in passes],
        "notes": state.notes[runtime._note :],
    }


def declines(rank, args):
    """Linears that make or take no pair, and a layer that is another one on one rank."""
    out: dict[str, Any] = {}
    backends = fp8_utils.Mxfp8DenseGemmBackend
    layer = fp8.projection("powers", 96, 0)
    method = layer.quant_method
    out["taken"] = form_of(layer).name

    def tried(name, owner, **changed):
        held = {key: getattr(owner, key) for key in changed if hasattr(owner, key)}
        vars(owner).update(changed)
        form = form_of(layer)
        out[name] = form if isinstance(form, str) else form.name
        for key in changed:
            del vars(owner)[key]
        vars(owner).update(held)

    tried("marlin", method, use_marlin=True)
    tried("one scale", method, block_quant=False)
    tried("cached", layer, _block_fp8_bf16_weight=torch.zeros(1))
    tried("cutlass", method, w8a8_block_fp8_linear=fp8_utils.cutlass_w8a8_block_fp8_linear_with_fallback)
    deep = fp8_utils.deepgemm_w8a8_block_fp8_linear_with_fallback
    partial = functools.partial(deep, act_scale_ue8m0=True)
    tried("deep_gemm, not Hopper", method, w8a8_block_fp8_linear=partial)
    platform, fp8_utils.get_platform = fp8_utils.get_platform, lambda: SimpleNamespace(is_sm90=True)
    tried("deep_gemm on Hopper", method, w8a8_block_fp8_linear=partial)
    tried("deep_gemm, fp32 scales", method, w8a8_block_fp8_linear=deep)
    fp8_utils.get_platform = platform
    tried("trtllm", method, use_mxfp8=True, mxfp8_dense_backend=backends.FLASHINFER_TRTLLM)
    tried("cutedsl", method, use_mxfp8=True, mxfp8_dense_backend=backends.FLASHINFER_CUTEDSL)
    bf16 = compared("platform", "bf16", 64)
    model = built("platform", reads={})
    if rank == 3:
        model.layers[0].self_attn.wqkv_a._block_fp8_bf16_weight = torch.zeros(1)
    runtime, state = sp.adapted(model, fp8=True), state_of("prefill_sp")
    return {"forms": out, "bf16": bf16, "unequal": state.notes[runtime._note :]}


SCENES = {f.__name__: f for f in (exact, few, modes, one_rank_is_off, one_rank_cannot_round, declines)}


def run(rank: int, args: Any, names: list[str]) -> dict[str, Any]:
    fp8.stand_ins()
    small.Attention, small.Backend = fp8.Attention, fp8.Backend
    return {name: SCENES[name](rank, args) for name in names}


if __name__ == "__main__":
    os.environ.setdefault("SGLANG_OPT_USE_TILELANG_MHC_POST", "0")
    sp.main(run)
