"""draft_tau (DSV41_DRAFT_TAU): the draft samples at tau times the request's temperature; the target keeps its own.

One scaled tensor drives both the draft's sampling and the draft probabilities of the rejection sampler. Rejection
sampling and block verification are exact for any draft law q, as long as the token was drawn from the q that is tested
(Leviathan et al., 2023; Sun et al., ICLR 2025); so tau moves the acceptance rate and nothing else. Greedy rows draft by
argmax and do not see it.

Guarantee: exact in distribution; greedy text identical.

0.5.22 and 0.5.23 resolve the draft's parameters in one function. 0.5.21 does it in two: for the folded draft graph, and
for the eager block. In 0.5.23 the sampling-accept region (SGLANG_OPT_DSV41_SAMPLING_ACCEPT_GRAPH) takes the *target's*
temperature from the draft's buffer; a second buffer, filled beside it and never scaled, is put in its place there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ._speculative_modes import WORKER, checked_worker_init
from .base import Adapter, AdapterState, Guarantee, Patch, Target

if TYPE_CHECKING:
    import torch

__all__ = ["DraftTau"]

_ROOM = "sglang.srt.speculative.dspark_components."
_DRAFT, _SAMPLER, _VERIFY, _REGION = (
    _ROOM + name for name in ("dspark_draft", "dspark_draft_sampler", "dspark_verify", "dspark_sampling_accept_graph")
)
_OLD, _NEW, _REGIONED = ("0.5.21",), ("0.5.22", "0.5.23"), ("0.5.23",)
_PARAMS = ("temperatures", "greedy_mask", "step_temperatures")
_BUFFER = "dsv41_target_temperatures"
# What the engine clamps temperatures at (resolve_draft_params).
_MIN_TEMPERATURE = 1e-5


class DraftTau(Adapter):
    name = "draft_tau"
    summary = "Scale the temperature that the draft samples at; the acceptance test uses the same draft law."
    guarantee = Guarantee.EXACT_IN_DISTRIBUTION
    docs = "docs/speculative.md"
    targets = (
        Target(_DRAFT, "resolve_draft_params", _NEW),
        Target(_DRAFT, "DraftParams", _NEW, patched=False),
        Target(_DRAFT, "sample_draft_block", _OLD),
        Target(_DRAFT, "sample_draft_block", _NEW, patched=False),
        Target(_DRAFT, "DraftBlockResult", patched=False),
        # Hands the same temperatures to the acceptance test as the draft sampled at.
        Target(_DRAFT, "DraftBlockProposer.propose", patched=False),
        Target(_SAMPLER, "DsparkDraftSampler.stage_sampling_params", ("0.5.21", "0.5.23")),
        Target(_SAMPLER, "DsparkDraftSampler.stage_sampling_params", ("0.5.22",), patched=False),
        Target(_SAMPLER, "DsparkDraftSampler.__init__", _REGIONED),
        Target(_SAMPLER, "DsparkDraftSampler.__call__", patched=False),
        Target(_VERIFY, "accept_draft_tokens", patched=False),
        Target(_REGION, "sampling_accept_commit_lens", _REGIONED),
        Target(_REGION, "GraphSamplingInfo", _REGIONED),
        Target(WORKER, "DSparkWorkerV2.__init__"),
    )

    def install(self, patch: Patch) -> None:
        from ..engine.gates import Gates

        tau = float(Gates.from_env()["DSV41_DRAFT_TAU"])
        region = _Region()
        old = patch.release in _OLD
        if "resolve_draft_params" in patch.qualnames:
            fields = tuple(patch.module.DraftParams._fields)
            if fields != _PARAMS:
                raise RuntimeError(f"DraftParams has the fields {fields}, expected {_PARAMS}")
        makers: dict[str, Callable[[Any], Any]] = {
            "resolve_draft_params": lambda original: _scaled(original, tau, patch.state),
            "sample_draft_block": lambda original: _scaled(original, tau, patch.state),
            "DsparkDraftSampler.stage_sampling_params": (
                (lambda original: _scaled_method(original, tau, patch.state)) if old else _staged_twice
            ),
            "DsparkDraftSampler.__init__": lambda original: _with_buffer(original, patch.state),
            "sampling_accept_commit_lens": region.around,
            "GraphSamplingInfo": region.sampling_info,
            "DSparkWorkerV2.__init__": lambda original: checked_worker_init(original, self.name, patch.state),
        }
        for qualname in patch.qualnames:
            patch.wrap(qualname, makers[qualname])


class ScaledSamplingInfo:
    """A SamplingBatchInfo whose temperatures are tau times those of `inner`; everything else is `inner`'s.

    `inner` is not touched: the target samples from it, and the engine recognises a batch by its tensors.
    """

    def __init__(self, inner: Any, tau: float) -> None:
        self._inner = inner
        self.temperatures: torch.Tensor = inner.temperatures * tau

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _scaled(original: Any, tau: float, state: AdapterState) -> Any:
    def scaled(*, sampling_info: Any, **kwargs: Any) -> Any:
        if sampling_info is None:
            return original(sampling_info=None, **kwargs)
        state.fire()
        return original(sampling_info=ScaledSamplingInfo(sampling_info, tau), **kwargs)

    return scaled


def _scaled_method(original: Any, tau: float, state: AdapterState) -> Any:
    def stage_sampling_params(self: Any, *, bs: int, sampling_info: Any) -> None:
        scaled = _scaled(lambda **kwargs: original(self, **kwargs), tau, state)
        scaled(bs=bs, sampling_info=sampling_info)

    return stage_sampling_params


def _with_buffer(original: Any, state: AdapterState) -> Any:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        # Here and not at first use: its address is baked into the captured region.
        buffer = self.params.temperatures.clone().fill_(1.0)
        setattr(self, _BUFFER, buffer)
        state.holds("target temperatures", buffer.numel() * buffer.element_size())

    return __init__


def _staged_twice(original: Any) -> Any:
    def stage_sampling_params(self: Any, *, bs: int, sampling_info: Any) -> None:
        original(self, bs=bs, sampling_info=sampling_info)
        buffer = getattr(self, _BUFFER)[:bs]
        if sampling_info is None:
            buffer.fill_(1.0)
        else:
            buffer.copy_(sampling_info.temperatures.view(-1)[:bs]).clamp_(min=_MIN_TEMPERATURE)

    return stage_sampling_params


class _Region:
    """Gives the sampling-accept region the target's own temperatures."""

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None

    def around(self, original: Any) -> Any:
        def sampling_accept_commit_lens(*args: Any, draft_sampler: Any, **kwargs: Any) -> Any:
            self._buffer = getattr(draft_sampler, _BUFFER)
            try:
                return original(*args, draft_sampler=draft_sampler, **kwargs)
            finally:
                self._buffer = None

        return sampling_accept_commit_lens

    def sampling_info(self, original: Any) -> Any:
        def graph_sampling_info(*, temperatures: torch.Tensor, **kwargs: Any) -> Any:
            if self._buffer is None:
                raise RuntimeError("GraphSamplingInfo was made outside the sampling-accept region")
            return original(temperatures=self._buffer[: temperatures.shape[0]], **kwargs)

        return graph_sampling_info
