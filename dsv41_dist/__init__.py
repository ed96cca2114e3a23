"""Distributed runtime extension for serving DeepSeek-V4.1-Flash with SGLang on a tensor-parallel group.

Importing this package imports neither torch nor sglang: `dsv41_dist.comm` is the communication layer.
"""

__version__ = "0.1.0"
