"""sm12x_dense_candidates (DSV41_SM12X_DENSE=auto|0|1): V4.1 attention that can be built on SM120 and SM121.

From SM100 on, `make_candidate_indexer` of every published release demands DeepGEMM's paged sparse MQA logits, which
exist for SM10x only: on a DGX Spark (SM121) or another SM12x GPU it raises, and the engine never boots. Here that case,
and no other, gets the release's own dense-block scheme for prefill and decode, the one that GPUs below SM100 have.

`auto` turns it on where the host has an SM12x GPU (asked of NVML when any variable of this project is set); 1 forces
it, 0 leaves the release as it is. A GPU that is not SM12x, a model without candidate blocks and a DeepGEMM that has the
kernels go the stock way whatever the gate says.

Guarantee: bit-identical, to the selection of the dense scheme: there is no stock result on this hardware to compare
with. Source: the published adapter line's shim; upstream pull request sgl-project/sglang#39914 goes the same way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .base import Adapter, AdapterState, Guarantee, Patch, Target

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import ModuleType

__all__ = ["SM12xDenseCandidates"]

_INDEXER = "sglang.srt.layers.attention.dsv4.v41_indexer"
_BACKEND = "sglang.srt.layers.attention.deepseek_v4_backend"
_CONFIGURER = "sglang.srt.layers.deep_gemm_wrapper.configurer"
GATE = "DSV41_SM12X_DENSE"


class SM12xDenseCandidates(Adapter):
    name = "sm12x_dense_candidates"
    summary = "Build V4.1 attention on SM120/SM121: dense candidate blocks where no sparse-table kernel exists."
    guarantee = Guarantee.BIT_IDENTICAL
    docs = "docs/prefill_kernels.md"
    targets = (
        Target(_INDEXER, "make_candidate_indexer"),
        Target(_INDEXER, "is_sm100_or_newer", patched=False),
        Target(_INDEXER, "_use_deep_gemm_prefill", patched=False),
        Target(_INDEXER + ".dense_blocks", "DenseBlocksBackend", patched=False),
        Target(_CONFIGURER, "_supports_paged_sparse_mqa_logits", patched=False),
        # Who asks for the pair, and (0.5.23) who asks which scheme it is.
        Target(_BACKEND, "DeepseekV4AttnBackend.__init__", patched=False),
        Target(_BACKEND, "DeepseekV4AttnBackend.low_ratio_prefill_graph", ("0.5.23",), patched=False),
    )

    def by_default(self, gates: Mapping[str, Any]) -> bool:
        from ..engine.gpus import compute_capabilities

        return gates[GATE] == "auto" and any(major == 12 for major, _ in compute_capabilities())

    def install(self, patch: Patch) -> None:
        patch.wrap("make_candidate_indexer", lambda original: _maker(original, patch.module, patch.state))


def _maker(original: Any, indexer: ModuleType, state: AdapterState) -> Any:
    def make_candidate_indexer(**arguments: Any) -> Any:
        if not _stock_would_raise(indexer, arguments["candidate_topk_blocks"]):
            return original(**arguments)
        from sglang.srt.layers.attention.dsv4.v41_indexer.dense_blocks import (  # pyright: ignore[reportMissingImports]
            DenseBlocksBackend,
        )

        # The release decides, as for every other GPU, whether prefill scores on DeepGEMM or on torch.
        deep_gemm = indexer._use_deep_gemm_prefill()
        kept = ("token_to_kv_pool", "req_to_token", "candidate_topk_blocks", "candidate_block_size")
        dense = DenseBlocksBackend(use_deep_gemm_prefill=deep_gemm, **{name: arguments[name] for name in kept})
        state.fire()
        scores = "DeepGEMM" if deep_gemm else "torch"
        note = f"dense candidate blocks for prefill (scores by {scores}) and decode"
        if note not in state.notes:
            state.notes.append(note)
        return dense, dense

    return make_candidate_indexer


def _stock_would_raise(indexer: ModuleType, topk_blocks: int) -> bool:
    import torch

    if topk_blocks <= 0 or not indexer.is_sm100_or_newer() or torch.cuda.get_device_capability()[0] != 12:
        return False
    from sglang.srt.layers.deep_gemm_wrapper import configurer  # pyright: ignore[reportMissingImports]

    return not configurer.DEEPGEMM_PAGED_SPARSE_MQA_LOGITS
