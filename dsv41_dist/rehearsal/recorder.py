"""Writes what each rank's forwards produced: logits bytes, per row, as digests (of a draft without logits: its hidden
states), and the collectives that were called.

Runs in the engine's processes.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import json
import os
import time
from typing import Any

__all__ = ["RECORD", "watch"]

RECORD = "REHEARSAL_RECORD"  # the folder that receives rank<N>.jsonl


def watch(after: Any) -> None:
    """Record in the scheduler processes, if the runner asks for it."""
    if os.environ.get(RECORD):
        after.add("sglang.srt.distributed.parallel_state", _coordinator)
        after.add("sglang.srt.model_executor.model_runner", _model_runner)


# The public calls of the engine's group object that move tensors of a forward.
_CALLS = ("all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor", "reduce_scatter", "broadcast")
_calls: dict[str, int] = {}
_inside = False


def _coordinator(module: Any) -> None:
    for name in _CALLS:
        if name in vars(module.GroupCoordinator):
            setattr(module.GroupCoordinator, name, _counted(name, vars(module.GroupCoordinator)[name]))


def _counted(name: str, stock: Any) -> Any:
    @functools.wraps(stock)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        global _inside
        # One call may be built on another; the outer one counts. A group of one moves nothing.
        outer = not _inside and self.world_size > 1
        if not outer:
            return stock(self, *args, **kwargs)
        _calls[name] = _calls.get(name, 0) + 1
        _inside = True
        try:
            return stock(self, *args, **kwargs)
        finally:
            _inside = False

    return call


def _model_runner(module: Any) -> None:
    runner = module.ModelRunner
    forward = runner.forward

    @functools.wraps(forward)
    def recorded(self: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        _calls.clear()
        output = forward(self, forward_batch, *args, **kwargs)
        if not _capturing():
            _write(self, forward_batch, output)
        return output

    runner.forward = recorded


def _capturing() -> bool:
    """Whether a CUDA graph is being recorded: its tensors have no values yet."""
    import torch

    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


_files: dict[int, Any] = {}


def _write(runner: Any, batch: Any, output: Any) -> None:
    output = getattr(output, "logits_output", output)
    rows = getattr(output, "next_token_logits", None)
    if rows is None:  # DSpark's draft: hidden states, and its head comes after the forward
        rows = getattr(output, "hidden_states", None)
    rank = _rank()
    if rank not in _files:
        _files[rank] = open(os.path.join(os.environ[RECORD], f"rank{rank}.jsonl"), "a")  # noqa: SIM115
        atexit.register(_files[rank].close)
    entry = {
        "mode": batch.forward_mode.name,
        "draft": bool(runner.is_draft_worker),
        "rows": int(batch.input_ids.shape[0]) if batch.input_ids is not None else 0,
        "requests": int(batch.batch_size),
        "collectives": dict(_calls),
        "fired": _fired(),
        "cpu_s": round(time.process_time(), 2),
        "logits": [] if rows is None else [_digest(row) for row in rows],
        "top": [] if rows is None else [_top(row) for row in rows],
    }
    _files[rank].write(json.dumps(entry) + "\n")
    _files[rank].flush()


def _fired() -> dict[str, int]:
    """How often each adapter has fired in this process so far."""
    from ..engine import boot

    armed = boot.armed()
    return {} if armed is None else {name: state.fired for name, state in armed.states.items()}


def _rank() -> int:
    from sglang.srt.runtime_context import get_parallel

    return int(get_parallel().tp_rank)


def _digest(row: Any) -> str:
    import torch

    data = row.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes()
    return hashlib.sha256(f"{row.dtype}".encode() + data).hexdigest()[:16]


def _top(row: Any) -> list[float]:
    """Column of the largest value (of logits: the token), that value, and the next one."""
    values, ids = row.float().topk(2)
    return [int(ids[0]), float(values[0]), float(values[1])]
