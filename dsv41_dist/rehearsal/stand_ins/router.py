"""The router as a GPU runs it: the engine's own Triton kernel, in one program over all rows, in the interpreter."""

from __future__ import annotations

from typing import Any

__all__ = ["by_one_program", "route_as_on_cuda"]


class Math:
    """In the place of `libdevice`, for which the interpreter has no body."""

    @staticmethod
    def exp(x: Any) -> Any:
        import triton.language as tl

        return tl.exp(x)

    @staticmethod
    def sqrt(x: Any) -> Any:
        import triton.language as tl

        return tl.sqrt(x)

    @staticmethod
    def log1p(x: Any) -> Any:
        """x * log(u) / (u - 1) with u = 1 + x rounded: an ulp or two off for every x >= 0 (Kahan)."""
        import triton.language as tl

        u = 1.0 + x
        tiny = u == 1.0
        return tl.where(tiny, x, x * tl.log(u) / tl.where(tiny, 1.0, u - 1.0))


class _OneProgram:
    """A row-tiled kernel, launched with one tile that takes all rows: the interpreter's cost is per operation."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)

    def __getitem__(self, grid: Any) -> Any:
        import triton

        def launch(scores: Any, *args: Any, **kwargs: Any) -> Any:
            kwargs["BLOCK_M"] = triton.next_power_of_2(scores.shape[0])
            return self._kernel[(1,)](scores, *args, **kwargs)

        return launch


def by_one_program(module: Any) -> None:
    """Change moe_fused_gate's module, or one made of its source, in place."""
    module.libdevice = Math
    module.is_arch_support_pdl = lambda: False
    module._router_triton_kernel = _OneProgram(module._router_triton_kernel)


def route_as_on_cuda(module: Any) -> None:
    """TopK would go by a torch function where the platform is not CUDA; V4.1 on a GPU goes by moe_fused_gate."""
    top = module.TopK
    top.forward_native = top.forward_cuda
