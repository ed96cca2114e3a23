"""The kernels of verify_cap.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["launch_copy_rows", "launch_live_rows"]


@triton.jit
def _live_rows(confidence, thresholds, out, confidence_stride, GAMMA: tl.constexpr):
    b = tl.program_id(0)
    length = 1
    going = 1
    for j in tl.static_range(2, GAMMA + 1):
        value = tl.load(confidence + b * confidence_stride + j - 1).to(tl.float32)
        # A comparison with NaN is false: NaN stops.
        going = tl.where(value >= tl.load(thresholds + j - 2), going, 0)
        length = tl.where(going == 1, j, length)
    tl.store(out + b, length + 1)


@triton.jit
def _copy_rows(
    weights, ids, packed, live, rows_in_use,
    stride_wm, stride_wk, stride_im, stride_ik, stride_pm, stride_pk,
    STRIDE: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, HAS_PACKED: tl.constexpr, HAS_PADDING: tl.constexpr,
):  # fmt: skip
    """One program a row. No race: an anchor row is never dead (live >= 1), so what is read is never written."""
    row = tl.program_id(0)
    b = row // STRIDE
    dead = row % STRIDE >= tl.load(live + b)
    if HAS_PADDING:
        dead = dead & (row < tl.load(rows_in_use))
    if dead:
        anchor = b * STRIDE
        k = tl.arange(0, BLOCK_K)
        mask = k < K
        value = tl.load(weights + anchor * stride_wm + k * stride_wk, mask=mask)
        tl.store(weights + row * stride_wm + k * stride_wk, value, mask=mask)
        index = tl.load(ids + anchor * stride_im + k * stride_ik, mask=mask)
        tl.store(ids + row * stride_im + k * stride_ik, index, mask=mask)
        if HAS_PACKED:
            both = tl.load(packed + anchor * stride_pm + k * stride_pk, mask=mask)
            tl.store(packed + row * stride_pm + k * stride_pk, both, mask=mask)


def launch_live_rows(confidence: torch.Tensor, thresholds: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """See verify_cap.live_rows."""
    bs, gamma = confidence.shape
    if bs:
        _live_rows[(bs,)](confidence, thresholds, out, confidence.stride(0), GAMMA=gamma, num_warps=1)
    return out


def launch_copy_rows(
    weights: torch.Tensor,
    ids: torch.Tensor,
    packed: torch.Tensor | None,
    live: torch.Tensor,
    stride: int,
    rows_in_use: torch.Tensor | None,
) -> None:
    """See verify_cap.copy_rows."""
    rows, k = weights.shape
    third = ids if packed is None else packed
    _copy_rows[(rows,)](
        weights,
        ids,
        third,
        live,
        live if rows_in_use is None else rows_in_use,
        *weights.stride(),
        *ids.stride(),
        *third.stride(),
        STRIDE=stride,
        K=k,
        BLOCK_K=triton.next_power_of_2(k),
        HAS_PACKED=packed is not None,
        HAS_PADDING=rows_in_use is not None,
        num_warps=1,
    )
