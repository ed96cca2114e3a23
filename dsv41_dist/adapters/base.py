"""What an adapter is. Torch-free, like every adapter module at import: arming must not import torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from ..engine.hook import Patch
from ..engine.state import AdapterState
from ..engine.symbols import Target

__all__ = ["Adapter", "AdapterState", "Guarantee", "Patch", "Target", "after_load"]


class Guarantee(StrEnum):
    """What an adapter promises about results, in the same words everywhere."""

    BIT_IDENTICAL = "bit-identical"  # bytes compared, by SelfCheck or in tests
    EXACT_IN_DISTRIBUTION = "exact in distribution"  # sampling
    REORDERED_SUM = "reordered sum"


class Adapter:
    """One gated change to the engine. A subclass fills the attributes and writes `install`.

    Attributes:
        name: as in the gates' `owner`.
        summary: one line for the reader.
        guarantee: what it promises about results.
        targets: every engine symbol it patches or relies on, with the releases it is there in.
        native: releases that do the same by themselves, and the flag that turns it on there. Targets it still has there
            are checked and patched.
        docs: page with more.
    """

    name: str
    summary: str
    guarantee: Guarantee
    targets: tuple[Target, ...]
    native: Mapping[str, str] = MappingProxyType({})
    docs: str = ""

    def by_default(self, gates: Mapping[str, Any]) -> bool:
        """Whether this machine needs it without its switch being set. Asked only when some variable of ours is set."""
        return False

    def install(self, patch: Patch) -> None:
        """Wrap every name in `patch.qualnames` of `patch.module`; called once for each module with patched targets.

        Any exception refuses the process. What runs later and needs torch is imported here, not at the top.
        """
        raise NotImplementedError


def after_load(attach: Callable[[Any, AdapterState], None], state: AdapterState) -> Callable[[Any], Any]:
    """The wrapper of `ModelRunner.load_model` that calls `attach(runner, state)` once the weights are there."""

    def wrap(original: Any) -> Any:
        def load_model(runner: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(runner, *args, **kwargs)
            attach(runner, state)
            return result

        return load_model

    return wrap
