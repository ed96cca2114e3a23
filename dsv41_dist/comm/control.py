"""The control plane: tiny exchanges over the CPU group that agreement and checked mode are made of.

Every exchange is the same MIN all-reduce of five int64, whatever it is for, so that ranks which meet in different calls
still meet, see that they differ, and can say so, instead of corrupting or hanging each other.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import torch

from .errors import DisagreementError, MismatchError, RankTimeout, TransportError
from .ranks import Ranks
from .transports.base import Transport
from .watch import Watch

__all__ = ["INVALID", "Control", "Identity"]

#: Less than any value that may be agreed on: a rank that cannot take part properly says this, and all ranks hear it.
INVALID = -(2**63) + 1


@dataclass(frozen=True)
class Identity:
    """What a call is, apart from its data: two ranks meet rightly when these are equal."""

    kind: str
    label: str
    fields: tuple[tuple[str, str], ...] = ()

    def describe(self, seq: int) -> dict[str, str]:
        return {"kind": self.kind, "label": self.label, "seq": str(seq), **dict(self.fields)}


class Control:
    """Votes over the CPU group. One per communicator."""

    def __init__(self, ranks: Ranks, watch: Watch) -> None:
        self._ranks = ranks
        self._watch = watch
        self._votes = 0
        self._settled: str | None = None  # the last vote that went through the store
        self._carrier = _carrier(ranks, watch)

    def vote(
        self, identity: Identity, value: int = 0, said: str = "", reason: str = "", arbiter: bool = False
    ) -> tuple[int, bool]:
        """One meeting of all ranks. Returns (the smallest value, whether `said` is equal everywhere).

        Raises MismatchError on every rank when the identities or sequence numbers differ, DisagreementError on every
        rank when one of them passed INVALID (with its `reason`), RankTimeout when one does not come. With `arbiter`
        the outcome is settled through the store too: even when a rank is lost halfway through, no two ranks leave with
        different results.
        """
        seq = self._watch.seq
        if self._ranks.size == 1:
            if value == INVALID:
                raise DisagreementError(identity.label, {0: reason}, "a rank could not vote")
            return value, True
        self._votes += 1
        call, answer = _hash(json.dumps(identity.describe(seq))), _hash(said)
        mine = torch.tensor([call, -call, answer, -answer, value], dtype=torch.int64, device="cpu")
        low = self._reduce_min(mine, arbiter)
        if low[0] != -low[1]:
            self._raise_mismatch(identity, seq)
        if low[4] == INVALID:
            reasons = {rank: text for rank, text in self.answers(reason).items() if text}
            raise DisagreementError(identity.label, reasons, "a rank could not vote")
        return low[4], low[2] == -low[3]

    def gather_text(self, text: str) -> list[str]:
        """Every rank's text, by rank. Only after a vote that told every rank to come here."""
        if self._ranks.size == 1:
            return [text]
        data = text.encode("utf-8", "surrogatepass")
        lengths = torch.zeros(self._ranks.size, dtype=torch.int64, device="cpu")
        self._carrier.all_gather_rows(torch.tensor([len(data)], dtype=torch.int64, device="cpu"), lengths)
        longest = max(1, int(lengths.max()))
        send = torch.zeros(longest, dtype=torch.uint8, device="cpu")
        send[: len(data)] = torch.tensor(list(data), dtype=torch.uint8, device="cpu")
        received = torch.zeros((self._ranks.size, longest), dtype=torch.uint8, device="cpu")
        self._carrier.all_gather_rows(send, received)
        texts = [bytes(received[r, : int(lengths[r])].tolist()) for r in range(self._ranks.size)]
        return [one.decode("utf-8", "surrogatepass") for one in texts]

    def answers(self, text: str) -> dict[int, str]:
        """What every rank said, for an error that all ranks are about to raise.

        A rank that is lost now cannot change the outcome of the vote before: what is known without it must do.
        """
        try:
            return dict(enumerate(self.gather_text(text)))
        except (RankTimeout, TransportError):
            return {self._ranks.rank: text}

    def _reduce_min(self, mine: torch.Tensor, arbiter: bool) -> list[int]:
        if not arbiter:
            self._carrier.all_reduce(mine, "min", mine)
            return mine.tolist()
        key = f"vote/{self._votes}"
        failure: Exception | None = None
        proposal = "failed"
        try:
            self._carrier.all_reduce(mine, "min", mine)
            proposal = json.dumps(mine.tolist())
        except Exception as error:
            failure = error
        # This vote's exchange is over here, so every rank has entered it and is done with those before.
        forget = self._settled if self._ranks.rank == 0 and failure is None else None
        settled = self._watch.arbitrate(key, proposal, forget)
        self._settled = key
        if settled == "failed":
            if failure is not None:
                raise failure
            self._watch.report("a rank was lost during the vote")
        return json.loads(settled)

    def _raise_mismatch(self, identity: Identity, seq: int) -> None:
        calls = self.answers(json.dumps(identity.describe(seq)))
        said = {rank: json.loads(text) for rank, text in calls.items()}
        # Ranks that lost count (a skipped call) agree on it again: the group goes on after a refusal.
        self._watch.seq = max(int(call["seq"]) for call in said.values())
        names = sorted({name for call in said.values() for name in call})
        differing = [name for name in names if len({call.get(name) for call in said.values()}) > 1]
        label = "/".join(sorted({call["label"] for call in said.values()}))
        raise MismatchError(label, {rank: _call_text(call) for rank, call in said.items()}, differing)


def _call_text(call: dict[str, Any]) -> str:
    rest = ", ".join(f"{name}={call[name]}" for name in call if name not in ("kind", "label", "seq"))
    return f"{call['kind']} {call['label']!r} #{call['seq']}" + (f" ({rest})" if rest else "")


def _hash(text: str) -> int:
    # Paths and variables of other encodings reach Python as lone surrogates: they must travel like any text.
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "big") >> 2


def _carrier(ranks: Ranks, watch: Watch) -> Transport:
    """The base transport over the CPU group."""
    from dataclasses import replace

    view = replace(ranks, device=torch.device("cpu"), device_group=ranks.cpu_group)
    if ranks.kind == "mpi":
        from .transports.mpi import MpiTransport

        return MpiTransport(view, watch)
    from .transports.process_group import ProcessGroupTransport

    return ProcessGroupTransport(view, watch)
