"""draft_main_proj (DSV41_DRAFT_MAIN_PROJ_SPLIT): the draft's projection of the target's hidden states, by columns.

`project_target_hidden` streams the whole main_proj (hidden size times the number of target features, by hidden size) on
every rank for a handful of rows. For up to 16 rows each rank computes its columns from its own fp8 twin of the weight,
which is kept only where it is the weight bit for bit, and the columns are gathered.

Guarantee: exact in distribution. The stock layer quantizes the activation to fp8 first, this one does not: the drafts
may differ (they are nearer to the unquantized model's), and the target verifies every one of them. All ranks hold the
same gathered bytes, so they draft alike.

Refused together with SGLANG_DSPARK_DEFER_CONTEXT_KV (0.5.23), which runs the projection on a side stream, where a
collective has no order against those of the main stream.
Source: the published adapter of the same name.
"""

from __future__ import annotations

from typing import Any

from .base import Adapter, AdapterState, Guarantee, Patch, Target, after_load

__all__ = ["DraftMainProj", "attach"]

_DRAFT = "sglang.srt.models.deepseek_v4_dspark"
_RUNNER = "sglang.srt.model_executor.model_runner"
_ROOM = "sglang.srt.speculative.dspark_components."
_MODEL = "DeepseekV4ForCausalLMDSpark"
_SINCE_23 = ("0.5.23",)
_PROJ = "_dsv41_main_proj"


class DraftMainProj(Adapter):
    name = "draft_main_proj"
    summary = "Compute the columns of the draft's target projection once by the group, from an exact fp8 twin."
    guarantee = Guarantee.EXACT_IN_DISTRIBUTION
    docs = "docs/split.md"
    targets = (
        Target(_DRAFT, f"{_MODEL}.project_target_hidden"),
        Target(_RUNNER, "ModelRunner.load_model"),
        Target("sglang.srt.layers.linear", "ReplicatedLinear.forward", patched=False),
        # Who calls it, and on which stream.
        Target(_DRAFT, f"{_MODEL}.write_target_hidden_kv", patched=False),
        Target(_DRAFT, f"{_MODEL}.project_commit_kv", _SINCE_23, patched=False),
        Target(_ROOM + "dspark_worker_v2", "DSparkWorkerV2._defer_context_kv_eligible", _SINCE_23, patched=False),
        Target(_ROOM + "dspark_deferred_commit", "DeferredContextCommit.logits_pre_hook", _SINCE_23, patched=False),
    )

    def install(self, patch: Patch) -> None:
        if patch.module.__name__ == _DRAFT:
            _refuse_side_stream(patch.release)
            patch.wrap(f"{_MODEL}.project_target_hidden", lambda original: _project(original, patch.state))
        else:
            patch.wrap("ModelRunner.load_model", after_load(attach, patch.state))


def _refuse_side_stream(release: str) -> None:
    if release not in _SINCE_23:
        return
    from sglang.srt.environ import envs  # pyright: ignore[reportMissingImports]

    if envs.SGLANG_DSPARK_DEFER_CONTEXT_KV.get():
        from ..engine.refusal import refuse

        refuse(
            "DSV41_DRAFT_MAIN_PROJ_SPLIT gathers inside the draft's projection, and SGLANG_DSPARK_DEFER_CONTEXT_KV "
            "moves that projection to a side stream, where a collective has no order against the others",
            "Unset one of the two on every rank.",
        )


def _project(original: Any, state: AdapterState) -> Any:
    def project_target_hidden(self: Any, main_hidden: Any) -> Any:
        proj = self.__dict__.get(_PROJ)
        if proj is None or not proj.serves(main_hidden):
            return original(self, main_hidden)
        state.fire()
        return self.stages[0].main_norm(proj(main_hidden))

    return project_target_hidden


def attach(runner: Any, state: AdapterState) -> None:
    """Prepare a loaded draft ModelRunner; any other is left alone. Collective over its TP group.

    All ranks take the split, or none; the reason against it is noted in the boot report.
    """
    if not runner.is_draft_worker or type(runner.model).__name__ != _MODEL:
        return
    from ._split_group import communicator, declined, exchanged

    why = declined(runner)
    if why is not None:
        state.notes.append(f"main_proj: stock, {why}")
        return
    import torch

    from ._split_layout import CannotSlice
    from ._split_main_proj import MainProj

    comm = communicator(state)
    proj, reasons = None, {}
    try:
        with torch.inference_mode():
            proj = MainProj(runner.model.stages[0].main_proj, comm)
    except CannotSlice as error:
        reasons = {"main_proj": str(error)}
    except Exception as error:  # an error of one rank (out of memory, say) must not leave the others waiting
        reasons = {"main_proj": f"{type(error).__name__}: {error}"}
    refused = exchanged(comm, reasons, "draft_main_proj:plan")
    if refused or proj is None:
        state.notes.append(f"main_proj: stock, {refused['main_proj']}")
        return
    runner.model.__dict__[_PROJ] = proj
    state.holds("fp8 twin", proj.twin.nbytes)
    state.notes.append(
        f"main_proj over {comm.ranks.size} ranks: a projection streams {proj.twin.nbytes / 1e6:.2f} MB of weights on "
        f"this rank instead of {proj.stock_bytes / 1e6:.2f} MB"
    )
