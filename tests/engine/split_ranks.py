"""Ranks for the split probes, run by the engine's interpreter: the engine is imported once and forked, each child joins
the engine's own TP group over gloo and runs `work`, and their results come back by rank."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch

BOUND_S = 240


def run_world(size: int, work: Callable[[int, Any], Any]) -> list[Any]:
    """`work(rank, server_args)` on `size` ranks; its JSON-able results, by rank. Ends this process if one fails."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    with TemporaryDirectory() as folder:
        pids = [_child(rank, size, port, f"{folder}/{rank}.json", work) for rank in range(size)]
        left, deadline, failed = dict(enumerate(pids)), time.time() + BOUND_S, []
        while left and time.time() < deadline and not failed:
            for rank, pid in list(left.items()):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    del left[rank]
                    failed += [rank] if status else []
            time.sleep(0.02)
        for pid in left.values():
            os.kill(pid, 9)
            os.waitpid(pid, 0)
        if left or failed:
            sys.exit(f"world {size}: rank {failed} failed, rank {list(left)} ended by the probe")
        out = []
        for rank in range(size):
            with open(f"{folder}/{rank}.json") as file:
                out.append(json.load(file))
        return out


def _child(rank: int, size: int, port: str, path: str, work: Callable[[int, Any], Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        torch.manual_seed(7)
        result = work(rank, _join(rank, size))
        torch.distributed.barrier()  # rank 0 serves the store: it must not end before the others are through
        with open(path, "w") as file:
            json.dump(result, file)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _join(rank: int, size: int) -> Any:
    """The engine's own start-up order; returns its server arguments."""
    from sglang.srt.distributed import parallel_state
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    args = ServerArgs(model_path="dummy", tp_size=size, device="cpu")
    publish(args, role="test", ranks=SpawnRanks(world_rank=rank, gpu_id=0))
    parallel_state.init_distributed_environment(
        world_size=size, rank=rank, local_rank=rank, backend="gloo", distributed_init_method="env://", timeout=120
    )
    parallel_state.initialize_model_parallel(backend="gloo")
    return args


def tree(layers: dict[str, torch.nn.Module]) -> torch.nn.Module:
    """A module tree with these layers at these dotted names."""
    root = torch.nn.Module()
    for name, layer in layers.items():
        *path, leaf = name.split(".")
        at = root
        for part in path:
            if part not in at._modules:
                at.add_module(part, torch.nn.Module())
            at = at._modules[part]
        at.add_module(leaf, layer)
    return root


def runner(args: Any, model: torch.nn.Module, **changed: Any) -> SimpleNamespace:
    """What the adapters read of a ModelRunner."""
    fields = {"server_args": args, "model": model, "is_draft_worker": False, "startup_weight_load": None}
    return SimpleNamespace(**{**fields, **changed})


def bits(x: torch.Tensor) -> bytes:
    return x.contiguous().view(torch.uint8).numpy().tobytes()


def state_of(name: str) -> Any:
    from dsv41_dist.engine import boot

    return boot.armed().states[name]
