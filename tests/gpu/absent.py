"""Packages with compiled code that the engine imports on CUDA and a GPU test machine lacks: sgl_kernel, deep_gemm.

`install` makes them importable; a function of theirs that is called says that it is not there: no test may need one."""

from __future__ import annotations

from dsv41_dist.rehearsal.stand_ins.absent import PACKAGES, install

__all__ = ["PACKAGES", "install"]
