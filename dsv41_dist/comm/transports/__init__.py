"""The ways to move bytes, one file each. `TRANSPORTS` names them; importing one is left until it is asked for."""

from __future__ import annotations

from importlib import import_module

from .base import OPS, REDUCE_OPS, SUM_DTYPES, Call, Transport

__all__ = ["OPS", "REDUCE_OPS", "SUM_DTYPES", "TRANSPORTS", "Call", "Transport", "transport_class"]

TRANSPORTS: dict[str, tuple[str, str]] = {
    "process_group": (".process_group", "ProcessGroupTransport"),
    "mpi": (".mpi", "MpiTransport"),
    "peer": (".peer", "PeerTransport"),
    "roce": (".roce", "RoceTransport"),
}


def transport_class(name: str) -> type[Transport]:
    """The class behind a name. Raises KeyError for an unknown one; the import itself may raise ImportError."""
    module, attribute = TRANSPORTS[name]
    return getattr(import_module(module, __name__), attribute)
