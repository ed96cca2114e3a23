"""The gated changes to the engine. REGISTRY is data: the adapters in install order."""

from .base import Adapter, Guarantee
from .folded_result_fence import FoldedResultFence

__all__ = ["REGISTRY", "Adapter", "Guarantee"]

REGISTRY: tuple[Adapter, ...] = (FoldedResultFence(),)
