"""The communicator that the adapters of one TP group share, and what an engine must be like for a layer to be split."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..comm import Communicator
    from ..engine.state import AdapterState

__all__ = ["Shared", "communicator", "declined", "exchanged", "forget", "one_rank", "other_rows", "shared"]

_ADVICE = "Set DSV41_ONESHOT=auto to serve without it, or put right what `python -m dsv41_dist preflight` shows."


@dataclass(frozen=True)
class Shared:
    """One communicator per TP group: a transport's buffers are paid for once.

    transport: the one-shot transport that connected on all ranks, or "". reason: why there is none.
    """

    comm: Communicator
    transport: str
    reason: str


_made: list[tuple[Any, Shared]] = []


def shared(tp_group: Any, state: AdapterState) -> Shared:
    """Collective over the group the first time it is asked for, by whichever adapter comes first.

    DSV41_ONESHOT chooses the one-shot transport: auto takes peer for a group on one host and roce for any other, and
    goes without when it cannot be had; peer and roce refuse to serve without it; off has none.
    """
    for group, made in _made:
        if group is tp_group:
            return made
    from ..comm import Communicator, Ranks
    from ..engine.gates import Gates
    from ..engine.refusal import refuse

    wanted = Gates.from_env()["DSV41_ONESHOT"]
    ranks = Ranks.from_object(tp_group)
    name = _by_hosts(ranks) if wanted == "auto" else wanted
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        comm = Communicator.create(ranks, [name] if name != "off" else [])
    reason = ""
    if name not in comm.transports:
        reason = "DSV41_ONESHOT=off"
        if name != "off":
            reason = next((str(one.message) for one in said if repr(name) in str(one.message)), "see rank 0")
        if wanted not in ("auto", "off"):
            comm.close()
            refuse(f"{state.name}: DSV41_ONESHOT={wanted}, and {reason}", _ADVICE)
    transport = comm.transports.get(name)
    if transport is not None:
        memory = getattr(transport, "memory_bytes", None) or getattr(getattr(transport, "layout", None), "nbytes", 0)
        state.holds(name, memory)
    elif ranks.rank == 0 and wanted == "auto":
        warnings.warn(reason, stacklevel=2)
    made = Shared(comm, name if transport is not None else "", reason)
    _made.append((tp_group, made))
    return made


def communicator(state: AdapterState) -> Communicator:
    """What the engine's TP group shares, with its own routes: what the one-shot transport can carry goes over it."""
    from sglang.srt.distributed.parallel_state import get_tp_group  # pyright: ignore[reportMissingImports]

    return shared(get_tp_group(), state).comm


def forget(tp_group: Any) -> None:
    """Close what the group shares; the group is about to go."""
    for one in [one for one in _made if one[0] is tp_group]:
        _made.remove(one)
        one[1].comm.close()


def _by_hosts(ranks: Any) -> str:
    """peer for a group on one host, roce for any other. Collective; the same answer on every rank."""
    from ..comm import Communicator
    from ..comm.ranks import host_identity

    base = Communicator.create(ranks)
    try:
        hosts = base.agreement.gather(host_identity().host, label="oneshot:hosts")
    finally:
        base.close()
    return "peer" if len(set(hosts)) == 1 else "roce"


def one_rank() -> str | None:
    """Why there is nothing to divide over the TP group, or None."""
    from sglang.srt.runtime_context import get_parallel  # pyright: ignore[reportMissingImports]

    return "the TP group has one rank" if get_parallel().tp_size < 2 else None


def other_rows() -> str | None:
    """Why the ranks of the TP group do not all run the same rows, or None."""
    from sglang.srt.runtime_context import get_parallel  # pyright: ignore[reportMissingImports]

    parallel = get_parallel()
    for name in ("attn_dp_size", "attn_cp_size"):
        if getattr(parallel, name) != 1:
            return f"{name} is {getattr(parallel, name)}: the ranks do not run the same rows"
    return None


def declined(runner: Any) -> str | None:
    """Why no layer of this ModelRunner can be split, or None. Only from what the ranks have in common."""
    why = one_rank() or other_rows()
    if why is not None:
        return why
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
