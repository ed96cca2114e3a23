"""Agreement: no rank changes its behaviour before all ranks have said that they will.

`agree` and `agree_min` are a MIN all-reduce; `same_everywhere` compares a value. The outcome is uniform: the same
result on every live rank, or the same class of error on every live rank, also when a rank is lost halfway (MPI ULFM's
contract for MPIX_Comm_agree). `SelfCheck` is the one way to switch a faster path on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Sequence
from typing import Any, cast

import torch

from .control import INVALID, Control, Identity
from .errors import DisagreementError
from .transports.base import as_bytes
from .watch import Watch

__all__ = ["Agreement", "SelfCheck", "same_bytes"]

_LIMIT = 2**62
Decision = Callable[[dict[str, Any]], None]


class Agreement:
    """The decisions of one communicator. `on_decision`, when given, is told of each (the decision log)."""

    def __init__(self, watch: Watch, control: Control, on_decision: Decision | None = None) -> None:
        self._watch = watch
        self._control = control
        self._on_decision = on_decision

    def agree(self, flag: bool, *, label: str) -> bool:
        """True on all ranks iff `flag` is True on all ranks.

        Anything but a bool on one rank raises DisagreementError on every rank, naming it.
        """
        valid = type(flag) is bool
        reason = "" if valid else f"flag={flag!r}: allowed is a bool"
        low = self._vote("agree", label, int(flag) if valid else INVALID, reason)
        return low == 1

    def agree_min(self, value: int, *, label: str) -> int:
        """The smallest value of all ranks, on all ranks. Integers between -2^62 and 2^62."""
        valid = type(value) is int and -_LIMIT <= value <= _LIMIT
        reason = "" if valid else f"value={value!r}: allowed is an integer from -2^62 to 2^62"
        return self._vote("agree_min", label, value if valid else INVALID, reason)

    def same_everywhere(self, value: Any, *, label: str) -> Any:
        """`value`, once every rank has said the same; JSON-able, compared as canonical JSON.

        Raises DisagreementError on every rank, listing who said what, when values differ, when one is not JSON-able,
        and when every rank says nothing (None or an empty text or collection): agreement on nothing is not agreement.
        """
        reason = ""
        try:
            text = json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError) as error:
            text, reason = "", f"{value!r} cannot be compared: {error}"
        self._watch.enter(label)
        _, same = self._control.vote(
            Identity("same_everywhere", label), INVALID if reason else 0, said=text, reason=reason, arbiter=True
        )
        if not same:
            raise DisagreementError(label, self._control.answers(text))
        if value is None or (isinstance(value, (str, list, tuple, dict)) and not value):
            said: dict[int, Any] = dict.fromkeys(range(self._watch.ranks.size), text)
            raise DisagreementError(label, said, "every rank says nothing, which is no agreement,")
        self._decided("same_everywhere", label, text)
        return value

    def gather(self, value: Any, *, label: str) -> list[Any]:
        """Every rank's `value` (JSON-able), by rank. For reports; it decides nothing.

        A value that is not JSON-able raises DisagreementError on every rank, naming it.
        """
        reason = ""
        try:
            text = json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError) as error:
            text, reason = "", f"{value!r} cannot be sent: {error}"
        self._watch.enter(label)
        self._control.vote(Identity("gather", label), INVALID if reason else 0, reason=reason)
        return [json.loads(said) for said in self._control.gather_text(text)]

    def _vote(self, kind: str, label: str, value: int, reason: str) -> int:
        self._watch.enter(label)
        low, _ = self._control.vote(Identity(kind, label), value, reason=reason, arbiter=True)
        self._decided(kind, label, low)
        return low

    def _decided(self, kind: str, label: str, result: object) -> None:
        if self._on_decision is not None:
            self._on_decision({"seq": self._watch.seq, "op": kind, "label": label, "result": result})


class SelfCheck:
    """Switches a faster path on, per key, only where it gives the stock path's bytes on every rank.

    At the first eager call of a key both paths run on the same inputs, outputs are compared byte for byte (NaN payloads
    too), ranks agree with MIN, and the verdict is locked: all ranks use the fast path for that key, or none. While a
    key is undecided inside a graph capture, stock is used. Keys and their order must be the same on every rank.
    `reasons` says of each key that failed which ranks saw what, in the same words on every rank.
    """

    def __init__(self, agreement: Agreement, name: str) -> None:
        self._agreement = agreement
        self._name = name
        self._verdicts: dict[Hashable, bool] = {}
        self.reasons: dict[Hashable, str] = {}

    def verdict(self, key: Hashable) -> bool | None:
        """True: fast. False: stock. None: not decided yet."""
        return self._verdicts.get(key)

    def run(
        self,
        key: Hashable,
        stock: Callable[..., Any],
        fast: Callable[..., Any],
        *args: Any,
        probes: Sequence[tuple[Any, ...]] = (),
        capturing: bool = False,
    ) -> Any:
        """The output for `args`: of `fast` once the key has passed, of `stock` otherwise (and on the deciding call).

        `probes` are further argument tuples to compare on (for example random inputs of the same shape). An exception
        in `fast` counts as a difference; one in `stock` is voted as a difference and then raised. Where the vote itself
        fails, because a path raised on one rank and left the others in its collective, that is the cause of the error.
        """
        known = self._verdicts.get(key)
        if known is not None:
            return fast(*args) if known else stock(*args)
        if capturing:
            return stock(*args)
        expected: Any = None
        failure: Exception | None = None  # of the stock path
        cause: Exception | None = None  # of either
        difference: str | None = None
        for index, inputs in enumerate([args, *probes]):
            try:
                wanted = stock(*inputs)
            except Exception as error:
                failure = cause = error
                difference = f"the stock path raised {type(error).__name__}: {error}"
                break
            if index == 0:
                expected = wanted
            try:
                difference = same_bytes(wanted, fast(*inputs))
            except Exception as error:
                cause = error
                difference = f"the fast path raised {type(error).__name__}: {error}"
            if difference is not None:
                difference = f"input {index}: {difference}"
                break
        try:
            agreed = self._agreement.agree(difference is None, label=f"self_check:{self._name}:{key}")
        except Exception as error:
            if cause is not None:
                raise error from cause
            raise
        self._verdicts[key] = agreed
        if not agreed:
            everyone = self._agreement.gather(difference or "", label=f"self_check:{self._name}:why")
            self.reasons[key] = "; ".join(f"rank {rank}: {why}" for rank, why in enumerate(everyone) if why)
        if failure is not None:
            raise failure
        return expected


def same_bytes(a: Any, b: Any) -> str | None:
    """None when two outputs (tensors, or tuples and lists of them) are equal byte for byte; else what differs."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.dtype != b.dtype or a.shape != b.shape:
            return f"{a.dtype} {tuple(a.shape)} against {b.dtype} {tuple(b.shape)}"
        if a.device != b.device:
            return f"a tensor on {a.device} against one on {b.device}"
        left, right = as_bytes(_dense(a)), as_bytes(_dense(b))
        if torch.equal(left, right):
            return None
        return f"{int((left != right).sum())} of {left.numel()} bytes differ"
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        left_parts, right_parts = cast("Sequence[Any]", a), cast("Sequence[Any]", b)
        if len(left_parts) != len(right_parts):
            return f"{len(left_parts)} outputs against {len(right_parts)}"
        found = (same_bytes(x, y) for x, y in zip(left_parts, right_parts, strict=True))
        return next((f"output {index}: {text}" for index, text in enumerate(found) if text is not None), None)
    if type(a) is not type(b) or a != b:
        return f"{a!r} against {b!r}"
    return None


def _dense(x: torch.Tensor) -> torch.Tensor:
    if x.is_complex():
        x = x.resolve_conj()
    return x.resolve_neg().contiguous()
