"""Whether the engine's own hyper-connection statistics repeat their bytes on this GPU, with this Triton."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["differing_calls"]


def differing_calls(rows: int, width: int, calls: int = 20) -> dict[str, int]:
    """Of `calls` calls of 0.5.23's hc_mix_stats_sinkhorn_bf16x3 on the same x [rows, width]: how many give other bytes
    than the first, by the kernel's pipeline stages. 3 are the engine's own; with 1 no load is in flight in a product.
    """
    from sglang.kernels.ops.layernorm import mhc

    gen = torch.Generator("cuda").manual_seed(7)
    draw = lambda *shape: torch.randn(*shape, generator=gen, device="cuda")  # noqa: E731
    x, parts = draw(rows, width).bfloat16(), mhc.split_bf16_hc_weight(draw(24, width) * 0.02)
    scale, base = draw(3), draw(24)
    kernel, found = mhc._hc_mix_stats_bf16x3_kernel, dict[str, int]()

    class Staged:
        def __init__(self, stages: int) -> None:
            self.stages = stages

        def __getitem__(self, grid: Any) -> Any:
            return lambda *args, **options: kernel[grid](*args, **{**options, "num_stages": self.stages})

    try:
        for stages in (3, 1):
            mhc._hc_mix_stats_bf16x3_kernel = Staged(stages)
            first, *others = (
                mhc.hc_mix_stats_sinkhorn_bf16x3(x, parts, scale, base, 20, 1e-6, 1e-6) for _ in range(calls + 1)
            )
            found[f"{stages} stages"] = sum(
                any(not torch.equal(a, b) for a, b in zip(other, first, strict=True)) for other in others
            )
    finally:
        mhc._hc_mix_stats_bf16x3_kernel = kernel
    return found
