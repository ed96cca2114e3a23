"""What verify_cap hands to the accept functions: how many of a request's verify rows are live."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

__all__ = ["LiveCutoff"]


class LiveCutoff(NamedTuple):
    """Stands where the engine passes a RaggedVerifyLayout, of which the accept reads one field.

    `verify_lens`: int32 [bs], live rows of each request (verified drafts + 1), from 2 to the stride.
    """

    verify_lens: torch.Tensor
