"""Stand-in for torchvision where its binary does not fit the installed torch: enough for `import sglang`, no more.

SGLang imports it for image inputs, which nothing here uses. Whatever is called raises.
"""

from . import io, transforms

__version__ = "0.0.0"
__all__ = ["io", "transforms"]
