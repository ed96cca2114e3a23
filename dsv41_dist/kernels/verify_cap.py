"""Live verify rows: how many drafts of a request are worth verifying, and routing the rest like the request's anchor.

A request has `stride` verify rows: the anchor and stride - 1 drafts. Rows 0..L are live, the rest dead. Dead rows keep
their place in the fixed-shape verify, but take the anchor row's experts, so that they stream no weights of their own.

On a GPU these are Triton kernels (verify_cap_triton.py), one launch each; elsewhere the plain-torch twins below.
`copy_rows` moves at most 3 K words a dead row (18 x 4 bytes at K = 6): it is launch-bound.
"""

from __future__ import annotations

import torch

__all__ = ["copy_rows", "copy_rows_torch", "live_rows", "live_rows_torch", "source_rows"]


def live_rows(confidence: torch.Tensor, thresholds: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Write each request's live rows L + 1 into `out` and return it.

    L = 1, then L = j for j = 2, 3, ... while confidence[b, j - 1] >= thresholds[j - 2]. Column c of the confidence
    follows from the drafts x_1..x_c, so [L >= j] follows from x_1..x_{j-1}: a causal cap. NaN stops.

    Args:
        confidence: float [bs, g], last dimension dense.
        thresholds: float32 [g - 1], for drafts 2..g.
        out: int32 [bs], contiguous.
    """
    bs, gamma = confidence.shape
    if thresholds.numel() != gamma - 1:
        raise ValueError(f"thresholds has {thresholds.numel()} elements: allowed is {gamma - 1} for {gamma} drafts")
    if out.dtype != torch.int32 or out.numel() != bs:
        raise ValueError(f"out is {out.dtype} with {out.numel()} elements: allowed is int32 with {bs}")
    if not confidence.is_cuda:
        return live_rows_torch(confidence, thresholds, out)
    from .verify_cap_triton import launch_live_rows

    return launch_live_rows(confidence, thresholds, out)


def live_rows_torch(confidence: torch.Tensor, thresholds: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """`live_rows` in plain torch: the twin."""
    goes_on = (confidence[:, 1:].float() >= thresholds).to(torch.int32).cumprod(1)
    return out.copy_(2 + goes_on.sum(1))


def source_rows(live: torch.Tensor, stride: int) -> torch.Tensor:
    """int64 [bs * stride]: for each row itself when it is live, else its request's anchor row."""
    rows = torch.arange(live.numel() * stride, device=live.device)
    dead = rows % stride >= live.repeat_interleave(stride)
    return torch.where(dead, rows - rows % stride, rows)


def copy_rows(
    weights: torch.Tensor,
    ids: torch.Tensor,
    packed: torch.Tensor | None,
    live: torch.Tensor,
    stride: int,
    rows_in_use: torch.Tensor | None = None,
) -> None:
    """Overwrite, in place, the routing of each dead row by its anchor row's.

    Args:
        weights, ids, packed: [bs * stride, K], any dtype and strides; `packed` may be absent.
        live: int32 [bs], from 1 to stride.
        rows_in_use: int32 scalar on the device; rows from there on are padding and stay as they are.
    """
    if weights.shape[0] != live.numel() * stride:
        raise ValueError(f"weights has {weights.shape[0]} rows: allowed is {live.numel()} requests x {stride} rows")
    if not weights.is_cuda:
        copy_rows_torch(weights, ids, packed, live, stride, rows_in_use)
        return
    from .verify_cap_triton import launch_copy_rows

    launch_copy_rows(weights, ids, packed, live, stride, rows_in_use)


def copy_rows_torch(
    weights: torch.Tensor,
    ids: torch.Tensor,
    packed: torch.Tensor | None,
    live: torch.Tensor,
    stride: int,
    rows_in_use: torch.Tensor | None = None,
) -> None:
    """`copy_rows` in plain torch: the twin."""
    source = source_rows(live, stride)
    if rows_in_use is not None:
        rows = torch.arange(len(source), device=source.device)
        source = torch.where(rows < rows_in_use, source, rows)
    for tensor in (weights, ids, packed):
        if tensor is not None:
            tensor.copy_(tensor[source])
