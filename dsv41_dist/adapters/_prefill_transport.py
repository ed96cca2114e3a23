"""0.5.23 on CUDA: the MoE's operand transport of a sharded chunk, as a subclass of the engine's.

The engine's layer boundary binds one transport for each sublayer call. It moves the operand to the rows that the
sublayer computes and its output back to the rows that the residual has, which is what a shard needs.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from ._prefill_fp8 import ROUTER

if TYPE_CHECKING:
    from ._prefill_chunk import Chunk

__all__ = ["moe_transport"]


@cache
def moe_transport() -> Callable[..., Any]:
    """The class, once the engine's modules are there: (chunk, layer, x, batch, call, rows), x [held, hidden]."""
    from sglang.srt.models import deepseek_v4_boundary as boundary  # pyright: ignore[reportMissingImports]
    from sglang.srt.models.deepseek_common.moe_transport import MoeFinalize  # pyright: ignore[reportMissingImports]
    from sglang.srt.models.deepseek_v2 import MoEOutput  # pyright: ignore[reportMissingImports]

    base: Any = boundary.MoeTransport

    class ShardedMoe(base):
        """input: gathered rows. The output is the held rows of the sum, complete: nothing is deferred."""

        def __init__(self, chunk: Chunk, layer: Any, x: torch.Tensor, batch: Any, call: Any, rows: Any) -> None:
            super().__init__(layer, chunk.gather_bf16(x, "prefill_sp:moe", ROUTER), batch, call, rows)
            self._chunk = chunk
            self.source_rows = x.shape[0]
            self.return_moe_output = self.defers_sum = False

        @contextmanager
        def scope(self) -> Generator[None]:
            with super().scope(), self._chunk.whole():
                yield

        def prepare_output(self, hidden_states: Any) -> torch.Tensor:
            self.input = None
            if isinstance(hidden_states, MoEOutput):
                return self._chunk.moe_finish(MoeFinalize(hidden_states))
            return self._chunk.moe_finish(MoeFinalize(partial=hidden_states))

    return ShardedMoe
