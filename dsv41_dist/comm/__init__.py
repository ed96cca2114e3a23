"""The communication layer: collectives, agreement and splits over the ranks of a group. Knows torch, nothing of SGLang.

    ranks = Ranks.from_torch()                     # or from_mpi(), or from_object(engine_group)
    comm = Communicator.create(ranks)
    y = comm.all_reduce(x, label="mlp")
    if comm.agreement.agree(ready, label="fast_path"): ...

What is named here is public; the modules behind it are not.
"""

from .agreement import Agreement, SelfCheck, same_bytes
from .calibrate import Calibration, calibrate
from .communicator import Communicator
from .errors import (
    ArgumentError,
    CommError,
    DisagreementError,
    LayoutError,
    MismatchError,
    RankTimeout,
    SettingsError,
    TransportError,
    TransportUnavailable,
)
from .layout import MAX_WORLD, CannotSplit, RowSplit, Split, TileSplit
from .observed import first_difference
from .ranks import Ranks
from .routing import Route, RouteTable
from .rows import RowMode, RowScope
from .settings import CommSettings
from .transports import OPS, REDUCE_OPS, SUM_DTYPES, TRANSPORTS, Call, Transport

__all__ = [
    "MAX_WORLD",
    "OPS",
    "REDUCE_OPS",
    "SUM_DTYPES",
    "TRANSPORTS",
    "Agreement",
    "ArgumentError",
    "Calibration",
    "Call",
    "CannotSplit",
    "CommError",
    "CommSettings",
    "Communicator",
    "DisagreementError",
    "LayoutError",
    "MismatchError",
    "RankTimeout",
    "Ranks",
    "Route",
    "RouteTable",
    "RowMode",
    "RowScope",
    "RowSplit",
    "SelfCheck",
    "SettingsError",
    "Split",
    "TileSplit",
    "Transport",
    "TransportError",
    "TransportUnavailable",
    "calibrate",
    "first_difference",
    "same_bytes",
]
