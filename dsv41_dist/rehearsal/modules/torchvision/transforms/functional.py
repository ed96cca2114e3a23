from enum import Enum


class InterpolationMode(Enum):
    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def pil_to_tensor(*args, **kwargs):
    raise RuntimeError("this is the stand-in for torchvision")


resize = to_tensor = normalize = pil_to_tensor
