"""indexer_chunked (DSV41_INDEXER_CHUNKED): the indexer's prefill scores in row tiles under a memory budget.

Native since 0.5.21: all three releases score in row tiles (2 GiB of fp32 logits on DeepGEMM, 1 GiB of bf16 scores on
torch) and publish block ids instead of masks, which is what the older backport brought. Its two forms have no target
left in the CUDA backend; the HIP backend still has the form without tiles and is not touched. What is left is the
budget: DSV41_INDEXER_BUDGET_MB sets both, smaller for less transient memory, larger for fewer launches.

Guarantee: bit-identical, given kernels that treat each row by itself; the engine's own tiling rests on the same.
Source: sgl-project/sglang#39187, taken up there as #39095 and #40217.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from .base import Adapter, AdapterState, Guarantee, Patch, Target

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

__all__ = ["IndexerChunked"]

_SCORING = "sglang.srt.layers.attention.dsv4.v41_indexer.scoring"
_TILES = "sglang.kernels.ops.attention.dsv4.index_logits"
_FLAG = "always on; DSV41_INDEXER_BUDGET_MB sets the budget of a row tile"
# Read at each call, so setting them is enough.
_BUDGETS = {"score_tiles": "_DEEP_GEMM_SCORE_BUDGET_BYTES", "_score_chunks": "_TORCH_SCORE_BUDGET_BYTES"}


class IndexerChunked(Adapter):
    name = "indexer_chunked"
    summary = "The indexer's row tiles are native since 0.5.21; set their memory budget."
    guarantee = Guarantee.BIT_IDENTICAL
    docs = "docs/prefill_kernels.md"
    native = MappingProxyType(dict.fromkeys(("0.5.21", "0.5.22", "0.5.23"), _FLAG))
    targets = (
        Target(_SCORING, "score_tiles"),
        Target(_SCORING, "_score_chunks"),
        Target(_TILES, "flat_index_logits_rows_per_tile", patched=False),
        Target(_TILES, "flat_index_logits_tiles", patched=False),
    )

    def install(self, patch: Patch) -> None:
        from ..engine.gates import Gates

        budget: int | None = Gates.from_env()["DSV41_INDEXER_BUDGET_MB"]
        for qualname in patch.qualnames:
            patch.wrap(qualname, _counted(patch.state))
        if budget is None:
            patch.state.notes.append("the engine's own budgets: DSV41_INDEXER_BUDGET_MB is not set")
            return
        patch.state.notes.append(_set_budgets(patch.module, budget))


def _set_budgets(scoring: ModuleType, mebibytes: int) -> str:
    """Set both budgets. Raises AttributeError where one is not there."""
    was: list[str] = []
    for name in _BUDGETS.values():
        was.append(f"{name} {getattr(scoring, name) >> 20} MiB")
        setattr(scoring, name, mebibytes << 20)
    return f"a row tile takes up to {mebibytes} MiB, not {' and '.join(was)}"


def _counted(state: AdapterState) -> Callable[[Any], Any]:
    def make(original: Any) -> Any:
        def tiles(*args: Any, **kwargs: Any) -> Any:
            state.fire()
            return original(*args, **kwargs)

        return tiles

    return make
