"""The engine's TP group agreeing on what it is about to run. Imports comm, and so torch, only to form a group."""

from __future__ import annotations

import atexit
import json
from typing import Any, NoReturn

from .refusal import refuse

__all__ = ["Group", "differences", "form"]

# Fields that hold problems: anything in them is one, whether ranks differ or not.
_PROBLEMS = ("drift", "refused", "problem")
_ADVICE = (
    "Make environment, engine and dsv41_dist the same on every rank: `python -m dsv41_dist preflight` compares them, "
    "`doctor` shows what drifted."
)


class Group:
    """The ranks of the TP group, for agreements of boot. Every method is collective over the group."""

    def __init__(self, communicator: Any, rank: int, size: int) -> None:
        self._communicator = communicator
        self.rank = rank
        self.size = size

    def same(self, statement: dict[str, Any], *, label: str) -> None:
        """Return if every rank states the same and nobody states a problem (_PROBLEMS).

        Otherwise every rank is refused with the same paragraph, which lists who said what, field by field; when a rank
        is lost before it could say what it has, each of the others is refused with what it knows.
        """
        from ..comm import CommError, DisagreementError

        said = [statement] * self.size
        try:
            self._communicator.agreement.same_everywhere(statement, label=label)
        except DisagreementError as error:
            # A rank that was lost after the vote has no answer here; the vote stands, whatever is known of it.
            try:
                said = [json.loads(error.said[rank]) for rank in range(self.size)]
            except (KeyError, TypeError, ValueError):
                refuse_group(label, error)
            if not differences(said):
                refuse_group(label, error)
        except CommError as error:
            refuse_group(label, error)
        lines = differences(said)
        if lines:
            refuse(f"the ranks of the TP group do not agree at {label}:\n" + "\n".join(lines), _ADVICE)

    def close(self) -> None:
        """Stop the side channel. Also run at exit: its thread must not meet an interpreter that is being torn down."""
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            communicator.close()


def form(tp_group: Any, timeout_s: float) -> Group:
    """A Group over the engine's own TP coordinator. A rank that does not come within `timeout_s` seconds is named in
    the refusal of all others."""
    from ..comm import CommError, CommSettings, Communicator, Ranks

    beat = min(CommSettings.heartbeat_s, timeout_s / 4)
    settings = CommSettings(init_timeout_s=timeout_s, timeout_s=timeout_s, heartbeat_s=beat)
    try:
        ranks = Ranks.from_object(tp_group)
        group = Group(Communicator.create(ranks, settings=settings), ranks.rank, ranks.size)
    except CommError as error:
        refuse_group("boot:group", error)
    atexit.register(group.close)
    return group


def refuse_group(label: str, error: Exception) -> NoReturn:
    refuse(
        f"the ranks of the TP group did not agree at {label}: {error}",
        "A rank that never came may have been started without the DSV41_* variables or without a door. " + _ADVICE,
    )


def differences(said: list[dict[str, Any]]) -> list[str]:
    """What ranks said differently, and every problem that any rank stated: one line each, the same on every rank."""
    lines: list[str] = []
    fields = list(dict.fromkeys(field for one in said for field in one))
    for field in fields:
        if field in _PROBLEMS:
            lines.extend(_folded(f"{field}: {problem}", ranks) for problem, ranks in _problems(said, field).items())
            continue
        values = [one.get(field) for one in said]
        if all(value == values[0] for value in values):
            continue
        if field == "gates" or all(isinstance(value, dict) for value in values):
            names = list(dict.fromkeys(name for value in values for name in (value or {})))
            for name in names:
                inner = [(value or {}).get(name) for value in values]
                if any(item != inner[0] for item in inner):
                    lines.append(_who(name, inner))
        elif field != "gates digest" or all(one.get("gates") == said[0].get("gates") for one in said):
            lines.append(_who(field, values))
    return lines


def _problems(said: list[dict[str, Any]], field: str) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for rank, one in enumerate(said):
        value = one.get(field) or []
        for problem in [value] if isinstance(value, str) else value:
            found.setdefault(problem, []).append(rank)
    return found


def _who(name: str, values: list[Any]) -> str:
    folded: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        folded.setdefault("unset" if value is None else json.dumps(value), []).append(rank)
    return f"  {name}: " + "; ".join(f"{_ranks(ranks)} said {text}" for text, ranks in folded.items())


def _folded(text: str, ranks: list[int]) -> str:
    return f"  {_ranks(ranks)}: {text}"


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {','.join(map(str, ranks))}"
