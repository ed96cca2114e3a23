"""router_live (DSV41_ROUTER_LIVE): with verify_cap, dead rows take their anchor's experts inside the router kernel.

verify_cap alone copies the anchor row's routing over dead rows with a second launch per layer. Here the router itself
reads the anchor's scores for a dead row: one launch. The kernel is made from the source of the *installed*
`moe_fused_gate` at import (adapters/_router_live_source.py): eight lines, each of which must be there exactly once, or
the process is refused.

Guarantee: bit-identical to verify_cap's copy (tested on the source of the three releases).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ._speculative_live import LIVE
from ._speculative_modes import WORKER, Facts, check, checked_worker_init
from .base import Adapter, AdapterState, Guarantee, Patch, Target

__all__ = ["RouterLive"]

GATE = "sglang.kernels.ops.moe.moe_fused_gate"


class RouterLive(Adapter):
    name = "router_live"
    summary = "Route dead verify rows like their anchor inside the router kernel (one launch less a layer)."
    guarantee = Guarantee.BIT_IDENTICAL
    docs = "docs/speculative.md"
    targets = (
        Target(GATE, "moe_fused_gate"),
        Target(GATE, "_router_triton_kernel", patched=False),
        Target(WORKER, "DSparkWorkerV2.__init__"),
    )

    def install(self, patch: Patch) -> None:
        from ..engine.gates import Gates

        check(self.name, Facts(Gates.from_env(), patch.release))
        for qualname in patch.qualnames:
            if qualname == "moe_fused_gate":
                from ._router_live_source import load

                assert patch.module.__file__ is not None
                live_module = load(Path(patch.module.__file__).read_text("utf-8"))
                patch.wrap(qualname, lambda original, m=live_module: _live_gate(original, m, patch.state))
            else:
                patch.wrap(qualname, lambda original: checked_worker_init(original, self.name, patch.state))


def _live_gate(original: Any, live_module: Any, state: AdapterState) -> Any:
    def moe_fused_gate(scores: Any, *args: Any, **kwargs: Any) -> Any:
        # Other score functions may take a fast path that knows nothing of live rows.
        live = LIVE.of(scores.shape[0]) if kwargs.get("scoring_func") == "sqrtsoftplus" else None
        if live is None:
            return original(scores, *args, **kwargs)
        state.fire()
        return live_module.moe_fused_gate(scores, *args, live=live, live_stride=LIVE.stride, **kwargs)

    return moe_fused_gate
