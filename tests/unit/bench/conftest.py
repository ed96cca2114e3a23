"""Where Triton is: its kernels run in the interpreter, as in tests/unit/speculative."""

from __future__ import annotations

from tests.unit.speculative.conftest import interpreter

__all__ = ["interpreter"]
