from ..functional import InterpolationMode, normalize, pil_to_tensor, resize, to_tensor

__all__ = ["InterpolationMode", "normalize", "pil_to_tensor", "resize", "to_tensor"]
