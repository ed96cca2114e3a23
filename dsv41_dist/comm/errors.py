"""The errors of the communication layer.

Each says what, where, which rank, and what to do. A caller that catches `CommError` has caught them all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = [
    "ArgumentError",
    "CommError",
    "DisagreementError",
    "LayoutError",
    "MismatchError",
    "RankTimeout",
    "SettingsError",
    "TransportError",
    "TransportUnavailable",
]


class CommError(RuntimeError):
    """Anything this layer refuses or fails at."""


class ArgumentError(CommError, ValueError):
    """A call that is wrong by itself: refused on the calling rank before anything moves."""


class LayoutError(ArgumentError):
    """Rows or columns that cannot be split as asked."""


class SettingsError(CommError, ValueError):
    """An environment variable with a value that is not allowed."""


class TransportUnavailable(CommError):
    """A transport cannot be used here; `reason` says what is missing and what to install or set."""

    def __init__(self, transport: str, reason: str) -> None:
        super().__init__(f"transport {transport!r} cannot be used here: {reason}")
        self.transport = transport
        self.reason = reason


class DisagreementError(CommError):
    """Ranks gave different answers where one was needed. Raised on every rank, with the same text.

    Attributes:
        label: the call that compared.
        said: what each rank said, by rank.
    """

    def __init__(self, label: str, said: Mapping[int, Any], what: str = "ranks do not agree") -> None:
        self.label = label
        self.said = dict(said)
        super().__init__(f"{what} at {label!r}: {describe_said(self.said)}")


class MismatchError(DisagreementError):
    """Ranks met in one step with different calls (label, order, op, dtype or shape); nothing was moved."""

    def __init__(self, label: str, said: Mapping[int, Any], fields: Sequence[str]) -> None:
        self.fields = tuple(fields)
        super().__init__(label, said, f"ranks made different calls ({', '.join(fields)} differ), nothing was moved,")


class RankTimeout(CommError):
    """One or more ranks did not arrive. Raised on every live rank, with the same content; final for the communicator.

    Attributes:
        missing: the ranks that did not arrive, ascending.
        label, seq: the call the others were in, and its number within the communicator.
        reached: for each rank the (label, seq) it was last known to have reached.
        states: for each missing rank what is known of its process ("dead", "stopped", "alive", "unknown").
    """

    def __init__(
        self,
        missing: Sequence[int],
        label: str,
        seq: int,
        reached: Mapping[int, tuple[str, int]],
        states: Mapping[int, str] | None = None,
        detail: str = "",
    ) -> None:
        self.missing = sorted(missing)
        self.label = label
        self.seq = seq
        self.reached = dict(reached)
        self.states = dict(states or {})
        who = ", ".join(
            f"rank {r} ({self.states.get(r, 'unknown')}, last reached {_at(self.reached.get(r))})" for r in self.missing
        )
        others = ", ".join(f"{r}: {_at(a)}" for r, a in sorted(self.reached.items()) if r not in self.missing)
        text = f"missing in {label!r} #{seq}: {who}"
        if others:
            text += f"; the others reached {others}"
        if detail:
            text += f"; {detail}"
        super().__init__(text + ". The communicator is closed: restart the group.")


class TransportError(CommError):
    """A transport failed though no rank is missing. Final for the communicator, like a time-out."""


def describe_said(said: Mapping[int, Any]) -> str:
    """`ranks 0,1,2 said X; rank 3 said Y`: equal answers are folded."""
    folded: dict[str, list[int]] = {}
    for rank, answer in sorted(said.items()):
        folded.setdefault(answer if isinstance(answer, str) else repr(answer), []).append(rank)
    parts: list[str] = []
    for answer, ranks in folded.items():
        noun = "rank" if len(ranks) == 1 else "ranks"
        parts.append(f"{noun} {','.join(map(str, ranks))} said {answer}")
    return "; ".join(parts)


def _at(reached: tuple[str, int] | None) -> str:
    return "nothing yet" if reached is None or reached[1] < 0 else f"{reached[0]!r} #{reached[1]}"
