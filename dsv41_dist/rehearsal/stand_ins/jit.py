"""The engine's CUDA kernels that are compiled when first used all pass through one function, `load_jit`. This is it."""

from __future__ import annotations

from typing import Any

import torch

from .formulas import key_norm_rope, pack_pages, rotate_, silu_mul_clamp

__all__ = ["load_jit"]

_PAGE = 256  # the engine fixes V4's page size; kernels that take it as an argument do so below


class _FusedRope:
    @staticmethod
    def forward(q: torch.Tensor, k: torch.Tensor | None, table: Any, positions: Any, inverse: bool) -> None:
        rotate_(q, table, positions, inverse)
        if k is not None:
            rotate_(k, table, positions, inverse)


class _KeyNormRope:
    @staticmethod
    def forward(kv: Any, weight: Any, table: Any, positions: Any, slots: Any, cache: Any, eps: float) -> None:
        pack_pages(key_norm_rope(kv, weight, table, positions, eps), slots, cache, _PAGE)


class _SiluMulClamp:
    @staticmethod
    def run(x: torch.Tensor, out: torch.Tensor, limit: float) -> None:
        out.copy_(silu_mul_clamp(x, limit).to(out.dtype))


class _Store:
    def __init__(self, page_size: int) -> None:
        self._page_size = page_size

    def run(self, x: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        pack_pages(x, slots, cache, self._page_size)


class _Missing:
    """A kernel without a stand-in: says which one was called, and with what."""

    def __init__(self, name: str, args: tuple[str, ...]) -> None:
        self._what = f"{name} {args}"

    def __getattr__(self, function: str) -> Any:
        if function.startswith("__"):
            raise AttributeError(function)

        def call(*args: Any, **kwargs: Any) -> None:
            given = [f"{tuple(a.shape)}:{a.dtype}" if isinstance(a, torch.Tensor) else repr(a) for a in args]
            raise NotImplementedError(f"no stand-in for JIT kernel {self._what}.{function}({', '.join(given)})")

        return call


def load_jit(name: str, *args: str, **_: Any) -> Any:
    """In place of sglang.kernels.jit.utils.load_jit: a module by its marker."""
    if name == "dpsk_v4_fused_rope":
        return _FusedRope
    if name == "dpsk_v4_main_k_norm_rope_flashmla":
        return _KeyNormRope
    if name == "dpsk_v4_silu_and_mul_clamp":
        return _SiluMulClamp
    if name == "dpsk_v4_store_flashmla" and args[3] == "V4":
        return _Store(int(args[2]))
    return _Missing(name, args)
