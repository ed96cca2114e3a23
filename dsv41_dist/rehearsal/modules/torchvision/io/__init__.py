from enum import Enum


class ImageReadMode(Enum):
    UNCHANGED = 0
    RGB = 3


def decode_image(*args, **kwargs):
    raise RuntimeError("this is the stand-in for torchvision")
