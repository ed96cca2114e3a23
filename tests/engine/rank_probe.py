"""One rank of four: the engine's own start-up order with its real modules, over gloo. Run by test_four_ranks.py.

Prints one JSON line on success. `PROBE_SPOIL` makes this rank lose its patch before it gets ready.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from types import SimpleNamespace

import torch.distributed as dist
from sglang.srt.distributed import parallel_state
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import ServerArgs


def main() -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    publish(
        ServerArgs(model_path="dummy", tp_size=size, device="cpu"),
        role="test",
        ranks=SpawnRanks(world_rank=rank, gpu_id=0),
    )
    parallel_state.init_distributed_environment(
        world_size=size, rank=rank, local_rank=rank, backend="gloo", distributed_init_method="env://", timeout=120
    )
    tp_group = parallel_state.get_tp_group

    def get_tp_group():  # the first thing an agreement asks for
        print(f"agreement at {time.time():.3f}", file=sys.stderr, flush=True)
        return tp_group()

    parallel_state.get_tp_group = get_tp_group
    parallel_state.initialize_model_parallel(backend="gloo")
    parallel_state.get_tp_group = tp_group
    print(f"agreed at {time.time():.3f}", file=sys.stderr, flush=True)

    # As the engine does: the DSpark modules come after the group, the scheduler says ready at the end.
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.speculative.dspark_components import dspark_verify, dspark_worker_v2

    verify = dspark_verify.TargetVerifyExecutor
    if os.environ.get("PROBE_SPOIL"):
        verify.accept_and_finalize = verify.accept_and_finalize.__wrapped__
    ready = SimpleNamespace()
    with contextlib.suppress(AttributeError):  # the stock function, after the agreement, wants a whole scheduler
        Scheduler.get_init_info(ready)
    from dsv41_dist.engine import boot

    armed = boot.armed()
    print(
        json.dumps(
            {
                "rank": rank,
                "armed": armed is not None,
                "ready": bool(armed and armed.ready),
                "report": boot.report(),
                "wrapped": hasattr(verify.accept_and_finalize, "__wrapped__"),
                "worker": dspark_worker_v2.__name__,
            }
        ),
        flush=True,
    )
    if armed is None:
        # A stock rank among armed ones: it meets them again at the next collective, or finds them gone.
        dist.all_reduce(__import__("torch").zeros(1), group=parallel_state.get_tp_group().cpu_group)
    dist.destroy_process_group()


main()
