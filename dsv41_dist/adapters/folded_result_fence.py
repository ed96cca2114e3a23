"""folded_result_fence (DSV41_FOLDED_FENCE): results of a folded accept do not alias the verify graph's buffers.

With DSpark, the verify CUDA graph writes the accept outcome into buffers that live as long as the engine, and the
scheduler receives views of them. Its device-to-host copies run on a stream that the next replay does not wait for:
when a copy is late, the host reads the next step's tokens and lengths (reported as sglang#40919; not fixed in 0.5.21
to 0.5.23). This adapter hands out clones, made on the stream of the forward, right behind the replay.

Guarantee: bit-identical. Cost: six (or seven) small copies per step, at most two steps' worth alive.

`read_accept` itself must not be patched: from 0.5.22 on, the accept inside the graph writes through what it returns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .base import Adapter, AdapterState, Guarantee, Patch, Target

__all__ = ["FoldedResultFence"]

_ROOM = "sglang.srt.speculative.dspark_components."
_VERIFY, _REGION, _WORKER = (
    _ROOM + name for name in ("dspark_verify", "dspark_sampling_accept_graph", "dspark_worker_v2")
)
_SINCE_23 = ("0.5.23",)
_FIELDS = ("correct_len", "bonus", "cap_trim_lens", "commit_lens", "new_seq_lens", "out_tokens")
# With overlap one step is read by the host while the next one runs.
_STEPS_ALIVE = 2


class FoldedResultFence(Adapter):
    name = "folded_result_fence"
    summary = "Clone the folded accept's results, so that a late copy to the host cannot read the next step's."
    guarantee = Guarantee.BIT_IDENTICAL
    docs = "docs/writing_an_adapter.md"
    targets = (
        Target(_VERIFY, "TargetVerifyExecutor.accept_and_finalize"),
        Target(_VERIFY, "DsparkVerifyEpilogue.read_accept", patched=False),
        Target(_VERIFY, "AcceptOuts", patched=False),
        Target(_REGION, "DsparkSamplingAcceptGraph.run", _SINCE_23),
        Target(_VERIFY, "DsparkVerifyEpilogue.read_block_accept_lens", _SINCE_23, patched=False),
        Target(_WORKER, "DSparkWorkerV2._block_accept_lens", _SINCE_23),
        # How the results leave: the views that the worker returns, and the copy that reads them.
        Target(_WORKER, "DSparkWorkerV2._forward_decode", patched=False),
        Target("sglang.srt.managers.utils", "GenerationBatchResult.copy_to_cpu", patched=False),
    )

    def install(self, patch: Patch) -> None:
        wrappers: dict[str, Callable[[Any, AdapterState], Any]] = {
            "TargetVerifyExecutor.accept_and_finalize": _fenced_accept,
            "DsparkSamplingAcceptGraph.run": _fenced_region,
            "DSparkWorkerV2._block_accept_lens": _fenced_block_lens,
        }
        if patch.module.__name__ == _VERIFY:
            fields = tuple(patch.module.AcceptOuts.__struct_fields__)
            if fields != _FIELDS:
                raise RuntimeError(f"AcceptOuts has the fields {fields}, expected {_FIELDS}")
        for qualname in patch.qualnames:
            patch.wrap(qualname, lambda original, make=wrappers[qualname]: make(original, patch.state))


def _fenced_accept(original: Any, state: AdapterState) -> Any:
    def accept_and_finalize(self: Any, *, folded_accept: bool, **kwargs: Any) -> Any:
        outs = original(self, folded_accept=folded_accept, **kwargs)
        # The eager accept returns tensors of its own; only the folded one returns views.
        return _clone(outs, state) if folded_accept else outs

    return accept_and_finalize


def _fenced_region(original: Any, state: AdapterState) -> Any:
    def run(self: Any, **kwargs: Any) -> Any:
        outs = original(self, **kwargs)
        return None if outs is None else _clone(outs, state)

    return run


def _fenced_block_lens(original: Any, state: AdapterState) -> Any:
    def _block_accept_lens(self: Any, **kwargs: Any) -> Any:
        lens = original(self, **kwargs)
        epilogue = self._verify_epilogue
        buffer = None if epilogue is None else epilogue.block_accept_lens_buf
        if buffer is None or lens.untyped_storage().data_ptr() != buffer.untyped_storage().data_ptr():
            return lens  # computed for this step, not a view
        state.fire()
        state.holds("block lens", _STEPS_ALIVE * lens.numel() * lens.element_size())
        return lens.clone()

    return _block_accept_lens


def _clone(outs: Any, state: AdapterState) -> Any:
    clones = {field: getattr(outs, field).clone() for field in _FIELDS}
    state.fire()
    state.holds("accept", _STEPS_ALIVE * sum(tensor.numel() * tensor.element_size() for tensor in clones.values()))
    return type(outs)(**clones)
