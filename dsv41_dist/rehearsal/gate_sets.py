"""What the rehearsal does with each adapter: the gates it sets, why an adapter cannot fire here, or why it is left out.

A test compares this table with the registry: a new adapter has a line here, or the test fails.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

__all__ = ["ADAPTERS", "Rehearsed", "cannot_fire", "every_gate", "left_out"]


@dataclass(frozen=True)
class Rehearsed:
    """`gates`: values for a model of this size; none: the adapter is left out, for the reason in `silent`.

    `silent` beside gates: the adapter is installed, and this is why it cannot fire on CPU processes; `silent_eager` and
    `silent_graphs`: on GPUs, where decode is eager and where it is from CUDA graphs. Empty where it can.
    """

    gates: Mapping[str, str] = field(default_factory=dict[str, str])
    silent: str = ""
    silent_eager: str = ""
    silent_graphs: str = ""


_SM12X = "it acts where torch reports an SM12x GPU: any other boots without it"
_NARROW = "on Hopper the engine calls hc_mix_stats_sinkhorn for a single row only, on Blackwell for every batch"

ADAPTERS: Mapping[str, Rehearsed] = {
    "draft_tau": Rehearsed({"DSV41_DRAFT_TAU": "0.8"}),
    "block_verify": Rehearsed({"DSV41_BLOCK_VERIFY": "1"}),
    "folded_result_fence": Rehearsed(
        {"DSV41_FOLDED_FENCE": "1"},
        "it wraps the accept folded into the verify graph, and there are no CUDA graphs here",
        silent_eager="it wraps the accept folded into the verify graph, and this boot is eager",
    ),
    "verify_cap": Rehearsed({"DSV41_VERIFY_CAP": "conf:0.5"}),
    "router_live": Rehearsed({"DSV41_ROUTER_LIVE": "1"}),
    "replicated_split": Rehearsed({"DSV41_REPLICATED_SPLIT": "wqkv_a,engram.wkv"}),
    "draft_main_proj": Rehearsed({"DSV41_DRAFT_MAIN_PROJ_SPLIT": "1"}),
    # Over the loopback stand-in. Shards of the logits of a small batch fit, those of a large one do not.
    "roce_gather": Rehearsed({"DSV41_ROCE_GATHER": "4096"}),
    "indexer_chunked": Rehearsed({"DSV41_INDEXER_CHUNKED": "1", "DSV41_INDEXER_BUDGET_MB": "16"}),
    "spark_prefill_dense": Rehearsed({"SPARK_PREFILL_TP_SPLIT": "1"}),
    # Two of the three chunks of the long prompt are 256 rows.
    "prefill_sp": Rehearsed({"DSV41_PREFILL_SP": "1", "DSV41_PREFILL_SP_MIN_ROWS": "128", "DSV41_PREFILL_SP_FP8": "1"}),
    "hc_fused": Rehearsed(
        {"DSV41_HC_FUSED": "1", "DSV41_HC_FUSED_MIN": "128"},
        "the engine makes these statistics by hc_mix_stats_sinkhorn for CUDA tensors only",
        _NARROW,
        _NARROW,
    ),
    "sm12x_dense_candidates": Rehearsed({"DSV41_SM12X_DENSE": "1"}, _SM12X, _SM12X, _SM12X),
}


_UNKNOWN = Rehearsed(silent="rehearsal/gate_sets.py has no line for it")


def every_gate(adapters: Iterable[str]) -> dict[str, str]:
    """The gates that rehearse all of `adapters` at once, without those that are left out."""
    return {name: value for adapter in adapters for name, value in ADAPTERS.get(adapter, _UNKNOWN).gates.items()}


def left_out(adapters: Iterable[str]) -> dict[str, str]:
    """Adapter -> why it is not rehearsed, in the order of `adapters`."""
    known = {adapter: ADAPTERS.get(adapter, _UNKNOWN) for adapter in adapters}
    return {adapter: entry.silent for adapter, entry in known.items() if not entry.gates}


def cannot_fire(adapter: str, device: str = "cpu", graphs: bool = False) -> str:
    """Why an adapter does not fire on CPU processes, or on GPUs (`device` cuda); "" if it can."""
    entry = ADAPTERS.get(adapter, Rehearsed())
    if device == "cpu":
        return entry.silent
    return entry.silent_graphs if graphs else entry.silent_eager
