"""The engine's first process: starts the engine or its server, sends the stages, writes what came back. Run by run.py.

    python -m dsv41_dist.rehearsal.worker FOLDER

FOLDER holds boot.json; it receives events.jsonl (progress), and rank<N>.jsonl from the ranks themselves.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

from .server import Engine, over_http, with_engine
from .settings import Boot, Stage

__all__ = ["main", "server_arguments"]


def server_arguments(boot: Boot) -> dict[str, Any]:
    """ServerArgs of the rehearsal, as the engine spells them."""
    arguments: dict[str, Any] = {
        "model_path": boot.checkpoint,
        "device": boot.device,
        "tp_size": boot.tp,
        "skip_tokenizer_init": True,
        "skip_server_warmup": True,
        "max_running_requests": 16,
        "max_total_tokens": 8192,
        "context_length": 2048,
        "chunked_prefill_size": 256,
        "random_seed": 1,
        "sampling_backend": "pytorch",
        "disable_cuda_graph": not boot.graphs,
        "disable_overlap_schedule": True,
        "watchdog_timeout": 600,
    }
    if boot.device == "cuda":
        # The experts' stand-in takes this runner's place. Custom all-reduce is in sgl_kernel, autotuning in FlashInfer.
        arguments |= {"moe_runner_backend": "triton"} if "flashinfer" in boot.absent or boot.order_free else {}
        arguments |= {"disable_custom_all_reduce": True} if "sgl_kernel" in boot.absent else {}
        arguments |= {"disable_flashinfer_autotune": True, "cuda_graph_max_bs_decode": 16}
        # On a GPU prefill_sp leaves chunks of at most 384 rows to the engine.
        arguments |= {"disable_prefill_cuda_graph": True, "chunked_prefill_size": 512}
    if boot.speculative:
        arguments["speculative_algorithm"] = "DSPARK"
    return arguments


class _Events:
    def __init__(self, folder: Path) -> None:
        self._file = (folder / "events.jsonl").open("a")
        self._start = time.monotonic()

    def say(self, event: str, **more: Any) -> None:
        entry = {"event": event, "seconds": round(time.monotonic() - self._start, 2), **more}
        self._file.write(json.dumps(entry) + "\n")
        self._file.flush()


_PR_SET_PDEATHSIG = 1


def main(folder: Path) -> None:
    # A runner that is killed cannot clean up; the engine's ranks end with this process in the same way.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    events = _Events(folder)
    boot = Boot.from_json(json.loads((folder / "boot.json").read_text()))

    async def work(engine: Engine) -> None:
        import sglang

        events.say("ready", ranks=_schedulers(), version=sglang.__version__)
        for stage in boot.stages:
            tokens, cached = await _together(engine, stage)
            about = {"name": stage.name, "sampled": stage.temperature > 0, "new_tokens": stage.new_tokens}
            events.say("stage", **about, tokens=tokens, cached=cached)
        events.say("done")

    (over_http if boot.http else with_engine)(server_arguments(boot), work)
    events.say("shut down")


async def _together(engine: Engine, stage: Stage) -> tuple[list[list[int]], list[int]]:
    """Output ids and cached prompt rows, by prompt."""
    sampling = {"max_new_tokens": stage.new_tokens, "temperature": stage.temperature, "ignore_eos": True}
    await engine.hold()
    tasks: list[asyncio.Task[dict[str, Any]]] = []
    for number, prompt in enumerate(stage.prompts, 1):
        request = {"input_ids": list(prompt), "sampling_params": sampling}
        tasks.append(asyncio.create_task(engine.generate(request)))
        await asyncio.sleep(0)
        while not tasks[-1].done() and await engine.waiting() < number:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.02)  # from the manager to the scheduler, in order
    await engine.release()
    answers = await asyncio.gather(*tasks)
    return [a["output_ids"] for a in answers], [int(a["meta_info"]["cached_tokens"]) for a in answers]


def _schedulers() -> dict[str, int]:
    """Rank -> process id of the engine's scheduler processes, by the title they give themselves."""
    import psutil

    found: dict[str, int] = {}
    for child in psutil.Process().children(recursive=True):
        title = " ".join(child.cmdline())
        if "sglang::scheduler" in title:
            rank = title.partition("_TP")[2].strip() or "0"
            found[rank.split("_")[0]] = child.pid
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]))
