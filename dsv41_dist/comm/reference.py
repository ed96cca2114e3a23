"""The meaning of every operation, in plain torch: the oracle of every test.

A function takes the inputs of all ranks (a list by rank) and returns what a rank must hold afterwards.
One-shot transports produce exactly these bits; others (NCCL, gloo) may sum in another order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .layout import Split

__all__ = ["all_gather", "all_gather_columns", "all_reduce", "broadcast", "reduce", "reduce_scatter"]

_HALF = (torch.float16, torch.bfloat16)


def reduce(shards: Sequence[torch.Tensor], op: str = "sum") -> torch.Tensor:
    """Reduce in rank order, beginning with rank 0's value itself (so -0.0 stays -0.0).

    fp16, bf16 and fp32 accumulate in fp32 and are rounded once, to nearest even; fp64 accumulates in fp64.
    Integers are exact in their own type and wrap. min and max propagate NaN.
    """
    dtype = shards[0].dtype
    total = shards[0].to(torch.float32) if dtype in _HALF else shards[0].clone()
    for shard in shards[1:]:
        value = shard.to(total.dtype)
        if op == "sum":
            total = total + value
        elif op == "prod":
            total = total * value
        elif op == "min":
            total = torch.minimum(total, value)
        elif op == "max":
            total = torch.maximum(total, value)
        else:
            raise ValueError(f"op={op!r}: allowed is sum, prod, min, max")
    return total.to(dtype)


def all_reduce(shards: Sequence[torch.Tensor], op: str = "sum") -> torch.Tensor:
    """[...] per rank -> [...] on every rank."""
    return reduce(shards, op)


def all_gather(shards: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """Equal shards side by side along dim, rank 0 first. A byte copy."""
    return torch.cat(list(shards), dim=dim)


def all_gather_columns(shards: Sequence[torch.Tensor], split: Split) -> torch.Tensor:
    """[..., split.sizes[r]] of rank r -> [..., split.n]. A byte copy; equal to pad + gather + cat of the real
    columns.
    """
    assert [shard.shape[-1] for shard in shards] == list(split.sizes)
    return torch.cat(list(shards), dim=-1)


def reduce_scatter(shards: Sequence[torch.Tensor], rank: int, op: str = "sum") -> torch.Tensor:
    """[rows, ...] per rank -> this rank's rows / world rows of the reduction."""
    return reduce(shards, op).chunk(len(shards), dim=0)[rank]


def broadcast(shards: Sequence[torch.Tensor], src: int) -> torch.Tensor:
    """The tensor of rank src."""
    return shards[src]
