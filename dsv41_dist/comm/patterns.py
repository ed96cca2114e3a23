"""Test data whose result is known exactly: every element follows from (seed, rank, index, op, dtype).

The idea of nccl-tests' verifiable inputs: sums are of integers so small that any order and any rounding gives the same
value, so that one wrong bit anywhere is found, on every backend. Gathered data is arbitrary bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["byte_pattern", "reduce_expected", "reduce_pattern", "wrong_elements"]


def _hash(n: int, device: torch.device | str, seed: int, rank: int, start: int = 0) -> torch.Tensor:
    """int64 [n], all 64 bits mixed: of index (from `start`), seed and rank; odd constants, wrapping, in place."""
    h = torch.arange(start + 1, start + 1 + n, dtype=torch.int64, device=device)
    h.mul_(0x9E3779B97F4A7C1).add_((rank + 1) * 2246822519 + (seed + 1) * 3266489917)
    h.bitwise_xor_(h >> 29).mul_(0x3F58476D1CE4E5B9)
    h.bitwise_xor_(h >> 32).mul_(0x14D049BB133111EB)
    return h.bitwise_xor_(h >> 31)


def reduce_pattern(
    shape: Sequence[int], dtype: torch.dtype, seed: int, rank: int, op: str = "sum", device: torch.device | str = "cpu"
) -> torch.Tensor:
    """This rank's input [shape] for a reduction; exact for up to 16 ranks in every summable dtype."""
    return _integers(shape, dtype, seed, rank, op, device).to(dtype).view(tuple(shape))


def reduce_expected(
    shape: Sequence[int],
    dtype: torch.dtype,
    seed: int,
    world: int,
    op: str = "sum",
    device: torch.device | str = "cpu",
    start: int = 0,
) -> torch.Tensor:
    """The exact result of reducing every rank's `reduce_pattern`; `start` is the first element of a part of it."""
    total = _integers(shape, dtype, seed, 0, op, device, start)
    for rank in range(1, world):
        value = _integers(shape, dtype, seed, rank, op, device, start)
        if op == "sum":
            total += value
        elif op == "prod":
            total *= value
        else:
            total = torch.minimum(total, value) if op == "min" else torch.maximum(total, value)
    return total.to(dtype).view(tuple(shape))


def _integers(
    shape: Sequence[int],
    dtype: torch.dtype,
    seed: int,
    rank: int,
    op: str,
    device: torch.device | str,
    start: int = 0,
) -> torch.Tensor:
    h = _hash(torch.Size(shape).numel(), device, seed, rank, start) & 0x7FFFFFFF
    unsigned = dtype == torch.uint8
    if op == "sum":
        # 16 ranks times 15 is 240, exact with the 8 significant bits of bf16; int8 ends at 127.
        reach = 7 if dtype == torch.int8 else 15
        return h % (reach + 1) if unsigned else h % (2 * reach + 1) - reach
    if op == "prod":
        # At most four ranks (of 16) double: 2^4 at most, and signs.
        size = 1 + (h & 1) if rank % 4 == 0 else torch.ones_like(h)
        return size if unsigned else size * (1 - 2 * ((h >> 1) & 1))
    return h % 201 if unsigned else h % 201 - 100


def byte_pattern(
    shape: Sequence[int], dtype: torch.dtype, seed: int, rank: int, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """This rank's input [shape] for a byte copy: arbitrary bytes of any dtype (0 and 1 for bool), NaNs included."""
    size = torch.empty(0, dtype=dtype).element_size()
    nbytes = torch.Size(shape).numel() * size
    data = _hash((nbytes + 7) // 8, device, seed, rank).view(torch.uint8)[:nbytes]
    if dtype == torch.bool:
        return (data & 1).to(torch.bool).view(tuple(shape))
    return data.view(dtype).view(tuple(shape))


def wrong_elements(got: torch.Tensor, expected: torch.Tensor) -> int:
    """How many elements differ in any byte. Shapes and dtypes must be equal."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        raise ValueError(f"{got.dtype} {tuple(got.shape)} against {expected.dtype} {tuple(expected.shape)}")
    if got.numel() == 0:
        return 0
    a, b = (t.contiguous().reshape(-1).view(torch.uint8).view(got.numel(), -1) for t in (got, expected))
    return int((a != b).any(dim=1).sum())
