"""replicated_split (DSV41_REPLICATED_SPLIT=<suffixes>): replicated linear layers computed once by the group.

A replicated layer makes every rank stream the whole weight for the same output. Here each rank computes its run of
128-column tiles with the layer's own kernel on views of the weight, and the columns are gathered: at few rows, where
the weight's traffic is the time, a rank reads 1/world of it. A layer is named by the end of its path in the model
(`wqkv_a`, `engram.wkv`), and runs whole above DSV41_REPLICATED_SPLIT_MAX_M rows.

Guarantee: bit-identical. Kernels may choose another tile or split of K for the narrower shape, so each (layer, input
kind, row count) is compared with the stock layer byte by byte, on the real input and three random ones, at its first
eager call; all ranks use the split for it, or none. Undecided inside a graph capture is stock.
Source: the published adapter of the same name; Megatron-LM's column-parallel linear, arXiv 1909.08053.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .base import Adapter, AdapterState, Guarantee, Patch, Target, after_load

if TYPE_CHECKING:
    from ._split_linear import SplitOptions

__all__ = ["ReplicatedSplit", "attach"]

_LINEAR = "sglang.srt.layers.linear"
_FP8 = "sglang.srt.layers.quantization.fp8"
_RUNNER = "sglang.srt.model_executor.model_runner"
_SPLIT = "_dsv41_split"
# Path components of modules that the engine runs on side streams, or whose weights it reads without calling them: a
# collective there has no order against those of the main stream.
_SIDE_STREAM = ("compressor", "indexer")


class ReplicatedSplit(Adapter):
    name = "replicated_split"
    summary = "Compute the columns of replicated linear layers once by the group, and gather them."
    guarantee = Guarantee.BIT_IDENTICAL
    docs = "docs/split.md"
    targets = (
        Target(_LINEAR, "ReplicatedLinear.forward"),
        Target(_RUNNER, "ModelRunner.load_model"),
        Target(_LINEAR, "ReplicatedLinear.__init__", patched=False),
        Target("sglang.srt.layers.quantization.unquant", "UnquantizedLinearMethod.apply", patched=False),
        # The layouts that are cut, and everything their consumer reads of a layer.
        Target(_FP8, "Fp8LinearMethod.apply", patched=False),
        Target(_FP8, "Fp8LinearMethod.process_weights_after_loading_block_quant", patched=False),
        Target(_FP8, "Fp8LinearMethod._prepare_block_fp8_as_mxfp8", patched=False),
        Target(_FP8, "Fp8LinearMethod._process_mxfp8_linear_weight_scale", patched=False),
        Target("sglang.srt.layers.quantization.mxfp8_input", "Mxfp8SwizzledInput", patched=False),
        Target("sglang.srt.layers.logits_processor", "get_in_autotune_dummy_run", patched=False),
    )

    def install(self, patch: Patch) -> None:
        if patch.module.__name__ == _LINEAR:
            patch.wrap("ReplicatedLinear.forward", _forward)
        else:
            patch.wrap("ModelRunner.load_model", after_load(attach, patch.state))


def _forward(original: Any) -> Any:
    def forward(self: Any, x: Any) -> Any:
        split = self.__dict__.get(_SPLIT)
        return original(self, x) if split is None else split.forward(original, x)

    return forward


def attach(runner: Any, state: AdapterState) -> None:
    """Split the layers of a loaded ModelRunner that the gate names. Collective over its TP group.

    What is declined is declined on all ranks and noted in the boot report with the reason.
    """
    from ..engine.gates import Gates
    from ._split_group import communicator, declined

    if runner.is_draft_worker:
        return  # its layers run on side streams or are read raw; draft_main_proj has the one that pays
    gates = Gates.from_env()
    suffixes: list[str] = gates["DSV41_REPLICATED_SPLIT"]
    why = declined(runner)
    if why is not None:
        state.notes.append(f"nothing is split: {why}")
        return
    from sglang.srt.layers.logits_processor import (  # pyright: ignore[reportMissingImports]
        get_in_autotune_dummy_run,
    )

    from ._split_linear import Checks, SplitOptions

    options = SplitOptions(
        max_rows=gates["DSV41_REPLICATED_SPLIT_MAX_M"],
        window=gates["DSV41_REPLICATED_SPLIT_WINDOW"],
        compact=gates["DSV41_SPLIT_COMPACT_GATHER"],
        stock_only=get_in_autotune_dummy_run,
    )
    checks = Checks(communicator(state), state)
    _split_layers(runner.model, suffixes, checks, options)


def _split_layers(model: Any, suffixes: list[str], checks: Any, options: SplitOptions) -> None:
    from sglang.srt.layers.linear import ReplicatedLinear  # pyright: ignore[reportMissingImports]

    from ..comm import TileSplit
    from ._split_group import exchanged
    from ._split_layout import TILE, CannotSlice
    from ._split_linear import SplitLayer

    comm, state = checks.comm, checks.state
    found: dict[str, tuple[Any, Any]] = {}
    reasons: dict[str, str] = {}
    for name, module in model.named_modules():
        suffix = next((s for s in suffixes if name == s or name.endswith("." + s)), None)
        if suffix is None:
            continue
        try:
            _check_module(name, module, ReplicatedLinear)
            split = TileSplit.plan(module.output_size, TILE, comm.ranks.size)
            if not split:
                raise CannotSlice(str(split))
            found[name] = module, SplitLayer(name, module, split, checks, options)
        except CannotSlice as error:
            reasons[name] = str(error)
    for suffix in suffixes:
        if not any(n == suffix or n.endswith("." + suffix) for n in [*found, *reasons]):
            reasons[f"*.{suffix}"] = "no layer of the model has this name"
    # A rank that lacks a layer the others have must be heard too.
    said = {name: reasons.get(name, "") for name in [*found, *reasons]}
    comm.agreement.same_everywhere(sorted(said) or ["none"], label="replicated_split:layers")
    refused = exchanged(comm, reasons, "replicated_split:plan")
    for why in dict.fromkeys(refused.values()):
        names = [name for name, text in refused.items() if text == why]
        state.notes.append(f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: stock, {why}")
    whole = part = 0
    for name, (module, layer) in found.items():
        if name not in refused:
            module.__dict__[_SPLIT] = layer
            stock_bytes, split_bytes = layer.weight_bytes
            whole, part = whole + stock_bytes, part + split_bytes
    kept = [layer for name, (_, layer) in found.items() if name not in refused]
    if kept:
        kinds = ", ".join(sorted({layer.kind.name for layer in kept}))
        state.holds("weights", 0)  # views
        count = f"{len(kept)} layer{'s' if len(kept) > 1 else ''} over {comm.ranks.size} ranks ({kinds})"
        streams = f"{part / 1e6:.2f} MB of their weights on this rank instead of {whole / 1e6:.2f} MB"
        state.notes.append(f"{count}: a step streams {streams}")


def _check_module(name: str, module: Any, replicated: type) -> None:
    from ._split_layout import CannotSlice

    if not isinstance(module, replicated):
        raise CannotSlice(f"it is a {type(module).__name__}, not a {replicated.__name__}")
    if type(module).forward is not replicated.forward or "forward" in vars(module):
        raise CannotSlice("it has a forward of its own")
    part = next((part for part in name.split(".") if part in _SIDE_STREAM), None)
    if part is not None:
        raise CannotSlice(f"the engine may run its {part} on a side stream, where a collective has no order")
