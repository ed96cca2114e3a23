from . import functional
from .functional import InterpolationMode

__all__ = ["InterpolationMode", "functional"]
