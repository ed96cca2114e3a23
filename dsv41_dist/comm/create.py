"""How a communicator comes to be: agree on what is wanted, connect all or none, freeze the routes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from .agreement import Agreement
from .communicator import Communicator
from .control import Control
from .errors import ArgumentError, TransportUnavailable
from .establish import connect, vote_step
from .observed import DecisionLog, ObservedCommunicator
from .ranks import Ranks
from .routing import Route, RouteTable
from .settings import CommSettings
from .transports import OPS, TRANSPORTS, Transport, transport_class
from .watch import Watch

__all__ = ["create"]


def create(ranks: Ranks, names: Sequence[str], table: RouteTable | None, settings: CommSettings) -> Communicator:
    """See Communicator.create. The order of steps is the same on every rank whatever happens on one of them."""
    for name in names:
        if name not in TRANSPORTS:
            raise ArgumentError(f"transport {name!r}: allowed is {', '.join(TRANSPORTS)}")
    base = "mpi" if ranks.kind == "mpi" else "process_group"
    wanted = [name for name in dict.fromkeys(names) if name != base]
    if table is None:
        table = RouteTable(base, tuple(Route(op, None, name) for name in wanted for op in OPS))
    watch = Watch(ranks, settings)
    with ExitStack() as undo:
        # When this fails nobody holds a communicator that could stop the side channel.
        undo.callback(watch.close)
        control = Control(ranks, watch)
        log, trouble = _decision_log(settings.log_dir, watch.name, ranks.rank)
        if log is not None:
            undo.callback(log.close)
        agreement = Agreement(watch, control, log.write if log else None)
        if log is not None:
            log.start()
        agreement.same_everywhere(
            {"settings": settings.digest_fields(), "transports": wanted, "table": table.as_json(), "group": watch.name},
            label="create:settings",
        )
        # Once the ranks have said the same: all of them raise, or none.
        if table.fallback != base:
            raise ArgumentError(f"route table fallback={table.fallback!r}: allowed is {base}, which carries every call")
        said = vote_step("create:log", lambda: trouble, watch, control, agreement)
        if said:
            raise ArgumentError("; ".join(said))
        said = vote_step("create:base", lambda: transport_class(base).probe(ranks), watch, control, agreement)
        if said:
            raise TransportUnavailable(base, "; ".join(said))
        connected: dict[str, Transport] = {base: transport_class(base)(ranks, watch)}
        for name in wanted:
            transport = connect(name, partial(transport_class, name), ranks, watch, control, agreement)
            if transport is not None:
                connected[name] = transport
        kind: Any = ObservedCommunicator if settings.check or log is not None else Communicator
        communicator: Communicator = kind(ranks, connected, table, watch, control, agreement)
        if isinstance(communicator, ObservedCommunicator):
            communicator.checked, communicator.log = settings.check, log
        agreement.same_everywhere(communicator.table.digest(), label="create:table")
        watch.started()
        undo.pop_all()
        return communicator


def _decision_log(folder: str | None, group: str, rank: int) -> tuple[DecisionLog | None, str | None]:
    """This rank's log, or why it has none though it was asked for: folders differ between ranks, so all are told."""
    try:
        return (DecisionLog(folder, group, rank) if folder else None), None
    except ArgumentError as error:
        return None, str(error)
