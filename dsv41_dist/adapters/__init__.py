"""The gated changes to the engine. REGISTRY is data: the adapters in install order."""

from .base import Adapter, Guarantee
from .folded_result_fence import FoldedResultFence

__all__ = ["REGISTRY", "Adapter", "Guarantee", "arm"]

REGISTRY: tuple[Adapter, ...] = (FoldedResultFence(),)


def arm() -> None:
    """The engine's plug-in door (entry point group `sglang.srt.plugins`): see engine/boot.py."""
    from ..engine import boot

    boot.arm(REGISTRY)
