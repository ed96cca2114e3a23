"""The communicator that the split layers share, and what an engine must be like for one of its layers to be split."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..comm import Communicator
    from ..engine.state import AdapterState

__all__ = ["communicator", "declined", "exchanged"]

_made: list[tuple[Any, Communicator]] = []


def communicator(tp_group: Any, state: AdapterState) -> Communicator:
    """One per TP group and process. Collective over the group the first time it is asked for.

    On GPUs the gathers go over the one-shot transport that DSV41_ONESHOT allows, where it connects on all ranks.
    """
    for group, made in _made:
        if group is tp_group:
            return made
    from ..comm import TRANSPORTS, Communicator, Ranks
    from ..engine.gates import Gates

    ranks = Ranks.from_object(tp_group)
    wanted = Gates.from_env()["DSV41_ONESHOT"]
    names = [name for name in ("roce", "peer") if name in TRANSPORTS and wanted in ("auto", name)]
    made = Communicator.create(ranks, names if ranks.device.type == "cuda" else ())
    _made.append((tp_group, made))
    layout = getattr(made.transports.get("peer"), "layout", None)
    if layout is not None:
        state.holds("peer transport", layout.nbytes)
    return made


def declined(runner: Any) -> str | None:
    """Why no layer of this ModelRunner can be split, or None. Only from what the ranks have in common."""
    from sglang.srt.runtime_context import get_parallel  # pyright: ignore[reportMissingImports]

    parallel = get_parallel()
    if parallel.tp_size < 2:
        return "the TP group has one rank"
    for name in ("attn_dp_size", "attn_cp_size"):
        if getattr(parallel, name) != 1:
            return f"{name} is {getattr(parallel, name)}: the ranks do not run the same rows"
    args = runner.server_args
    if args.enable_lora or args.lora_paths:
        return "LoRA wraps linear layers and reads their weights"
    if runner.startup_weight_load is not None:
        return "weights are loaded while the engine starts (startup weight load), after the layers are looked at"
    return None


def exchanged(comm: Communicator, reasons: dict[str, str], label: str) -> dict[str, str]:
    """`reasons` of every rank put together, the same on every rank: key -> "rank 2: why; rank 3: why"."""
    everyone = comm.agreement.gather(reasons, label=label)
    out: dict[str, str] = {}
    for key in sorted({key for one in everyone for key in one}):
        said: dict[str, list[str]] = {}
        for rank, one in enumerate(everyone):
            if key in one:
                said.setdefault(one[key], []).append(str(rank))
        all_same = len(said) == 1 and len(next(iter(said.values()))) == len(everyone)
        out[key] = "; ".join(
            why if all_same else f"rank{'s' if len(ranks) > 1 else ''} {','.join(ranks)}: {why}"
            for why, ranks in said.items()
        )
    return out
