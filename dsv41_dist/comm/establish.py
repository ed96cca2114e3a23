"""All ranks or none: a transport is connected by every rank, or by no rank, and everybody knows why."""

from __future__ import annotations

import base64
import json
import warnings
from collections.abc import Callable, Sequence

from .agreement import Agreement
from .control import Control
from .errors import CommError
from .ranks import Ranks
from .transports import Transport
from .watch import Watch

__all__ = ["connect", "vote_step"]


def connect(
    name: str, load: Callable[[], type[Transport]], ranks: Ranks, watch: Watch, control: Control, agreement: Agreement
) -> Transport | None:
    """Connect one transport over the group, or return None on every rank after one warning that says who and why.

    Steps, each local with its error carried and then voted on, so that one rank's missing card, compiler or symbol
    takes every rank back together: probe; construct and allocate; exchange; attach. Nothing that can block runs
    before its vote.
    """
    made: list[Transport] = []
    blobs: list[str] = []

    def probe() -> str | None:
        return load().probe(ranks)

    def allocate() -> None:
        made.append(load()(ranks, watch))
        blobs.append(base64.b64encode(made[0].allocate()).decode())

    def attach() -> None:
        made[0].attach([base64.b64decode(text) for text in everyone])

    everyone: list[str] = []
    for step, action in (("probe", probe), ("allocate", allocate), ("attach", attach)):
        if step == "attach":
            watch.enter(f"connect:{name}:exchange")
            everyone = control.gather_text(blobs[0])
        reasons = vote_step(f"connect:{name}:{step}", action, watch, control, agreement)
        if reasons:
            if step == "attach":
                # Nothing has run yet: memory that no rank has open any more can be freed without waiting for anybody.
                made[0].detach()
                agreement.agree(True, label=f"connect:{name}:detach")
            if made:
                made[0].close()
            if ranks.rank == 0:
                warnings.warn(f"transport {name!r} is used by no rank: {'; '.join(reasons)}", stacklevel=3)
            return None
    return made[0]


def vote_step(
    label: str, action: Callable[[], str | None], watch: Watch, control: Control, agreement: Agreement
) -> Sequence[str]:
    """Run a local step on every rank and vote on it: who could not and why, the same on every rank; empty if all could.

    `action` returns the reason, or None, or raises."""
    try:
        reason = action()
    except CommError as error:
        if watch.closed:  # the group is gone: that is not a local failure to vote on
            raise
        reason = f"{type(error).__name__}: {error}"
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    if agreement.agree(reason is None, label=label):
        return ()
    said = [json.loads(text) for text in control.gather_text(json.dumps(reason))]
    return [f"rank {rank}: {why}" for rank, why in enumerate(said) if why is not None]
