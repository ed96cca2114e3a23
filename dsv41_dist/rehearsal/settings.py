"""What one boot of the engine is asked to do, as JSON between runner and engine; and the engine's environment."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .stand_ins.install import ORDER_FREE
from .stand_ins.on_gpu import ABSENT, DEVICE, RANKS, write_absent

__all__ = ["PACKAGE_ROOT", "Boot", "Stage", "default_stages", "engine_environment", "write_site"]

HERE = Path(__file__).resolve().parent
PACKAGE_ROOT = HERE.parent.parent
TAG = "REHEARSAL_RUN"  # marks every process of a run, so that none is left behind
_LONG = 600  # rows: three chunks of the engine's 256-row pages


@dataclass(frozen=True)
class Stage:
    """Requests that arrive together, each a list of token ids, and how many tokens each generates.

    temperature 0 is greedy. Sampled text follows from the server's seed, which is fixed.
    """

    name: str
    prompts: tuple[tuple[int, ...], ...]
    new_tokens: int
    temperature: float = 0.0


@dataclass(frozen=True)
class Boot:
    """One engine: `tree` is a folder with an unpacked release, put before the installed one; "" for the installed.

    `http`: the engine's HTTP server and a client, instead of the offline engine. `device`: cpu or cuda; on cuda
    `absent` names the packages of compiled code that do not load there, and `graphs` has it record CUDA graphs.
    """

    checkpoint: str
    stages: tuple[Stage, ...]
    tp: int = 4
    gates: Mapping[str, str] = field(default_factory=dict[str, str])
    tree: str = ""
    speculative: bool = False
    order_free: bool = False
    http: bool = False
    device: str = "cpu"
    graphs: bool = False
    absent: tuple[str, ...] = ()
    extra_path: tuple[str, ...] = ()
    extra_env: Mapping[str, str] = field(default_factory=dict[str, str])

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Boot:
        stages = tuple(Stage(**{**stage, "prompts": tuple(map(tuple, stage["prompts"]))}) for stage in data["stages"])
        return cls(
            **{**data, "stages": stages, "extra_path": tuple(data["extra_path"]), "absent": tuple(data["absent"])}
        )

    def digest(self) -> str:
        """16 hex digits over everything that decides the outcome."""
        return hashlib.sha256(json.dumps(self.as_json(), sort_keys=True).encode()).hexdigest()[:16]


def default_stages(
    new_tokens: int = 6, vocab: int = 1024, long: bool = True, sampled: bool = False
) -> tuple[Stage, ...]:
    """Ten short prompts at once; `long`: then one of three prefill chunks, then one that shares its first 512 rows;
    `sampled`: then two that are sampled (which is what a draft's temperature and the rule that accepts sampled drafts
    need)."""
    lengths = (6, 9, 12, 17, 24, 31, 40, 20, 15, 50)
    short = tuple(_prompt(length, index, vocab) for index, length in enumerate(lengths))
    stages = [Stage("ten prompts at once", short, new_tokens)]
    if long:
        first = _prompt(_LONG, 11, vocab)
        second = first[:550] + _prompt(30, 12, vocab)
        stages.append(Stage(f"{_LONG} rows in chunks", (first,), new_tokens))
        stages.append(Stage("a prefix seen before", (second,), new_tokens))
    if sampled:
        prompts = tuple(_prompt(length, 20 + length, vocab) for length in (8, 21))
        stages.append(Stage("two sampled", prompts, new_tokens, 0.8))
    return tuple(stages)


def _prompt(length: int, index: int, vocab: int) -> tuple[int, ...]:
    words = hashlib.shake_256(f"prompt {index}".encode()).digest(2 * length)
    return tuple(3 + int.from_bytes(words[2 * i : 2 * i + 2], "big") % (vocab - 3) for i in range(length))


def write_site(folder: Path) -> Path:
    """A folder for PYTHONPATH whose metadata has the engine load the stand-ins in each of its processes."""
    info = folder / "dsv41_rehearsal-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: dsv41-rehearsal\nVersion: 0\n")
    entry = "rehearsal = dsv41_dist.rehearsal.stand_ins:register"
    (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{entry}\n")
    return folder


def engine_environment(boot: Boot, folder: Path, run: str, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Environment of the engine's first process; the others inherit it. `folder` is the boot's own, `run` its tag."""
    base = os.environ if base is None else base
    dropped = ("DSV41_", "SPARK_PREFILL_", "SGLANG_", "PYTHON", "TRITON_", "REHEARSAL_")
    env = {name: value for name, value in base.items() if not name.startswith(dropped)}
    # The door for the adapters comes first, and only where a gate is set: stock means stock.
    door = [str(PACKAGE_ROOT / "dsv41_dist" / "sitecustomize")] if boot.gates else []
    tree = [boot.tree] if boot.tree else []
    site = [str(write_site(folder / "site")), str(PACKAGE_ROOT), *boot.extra_path, *tree, str(HERE / "models")]
    if boot.device == "cpu" or "torchvision" in boot.absent:
        site.append(str(HERE / "modules"))
    if boot.device == "cuda":
        write_absent(folder / "absent", boot.absent)
        site.append(str(folder / "absent"))
    return {
        **env,
        "PYTHONPATH": os.pathsep.join([*door, *site]),
        "PYTHONWARNINGS": "ignore",
        # An unpacked release has no bytecode yet, and six processes would each compile it.
        **({} if boot.tree else {"PYTHONDONTWRITEBYTECODE": "1"}),
        "OMP_NUM_THREADS": "1",
        **(_on_gpu(boot) if boot.device == "cuda" else _on_cpu(boot)),
        "SGLANG_EXTERNAL_MODEL_PACKAGE": "rehearsal_models",
        "REHEARSAL_RECORD": str(folder),
        ORDER_FREE: "1" if boot.order_free else "0",
        TAG: run,
        **boot.extra_env,
        **({**boot.gates, "DSV41_BOOT_REPORT": str(folder / "boot_report.json")} if boot.gates else {}),
    }


def _on_cpu(boot: Boot) -> dict[str, str]:
    return {
        "CUDA_VISIBLE_DEVICES": "",
        "TRITON_INTERPRET": "1",
        "SGLANG_USE_CPU_ENGINE": "0",
        "SGLANG_CPU_OMP_THREADS_BIND": _cores(boot.tp),
        "SGLANG_SM120_FLASHMLA_BACKEND": "torch",
        "SGLANG_OPT_USE_TILELANG_MHC_PRE": "0",
        "SGLANG_OPT_USE_TILELANG_MHC_POST": "0",
    }


def _on_gpu(boot: Boot) -> dict[str, str]:
    # The replay tail's own prefill graph (0.5.23) has no room for a sliding-window layer among the late ones, as here:
    # it writes that layer's keys at a bucket's rows from inside the graph, and the tail has fewer.
    env = {DEVICE: "cuda", ABSENT: ",".join(boot.absent), RANKS: str(boot.tp)}
    env["SGLANG_DSV4_DECODER_TAIL_GRAPH_MAX_ROWS"] = "0"
    if "deep_gemm" in boot.absent:
        # The second is about a schedule for DeepGEMM's paged kernel, which V4.1's indexer does not use on Hopper.
        env |= {"SGLANG_ENABLE_JIT_DEEPGEMM": "0", "SGLANG_FP8_PAGED_MQA_LOGITS_TORCH": "1"}
    if "tilelang" in boot.absent:
        env |= {"SGLANG_OPT_USE_TILELANG_MHC_PRE": "0", "SGLANG_OPT_USE_TILELANG_MHC_POST": "0"}
    return env


def _cores(tp: int) -> str:
    cores: Sequence[int] = sorted(os.sched_getaffinity(0))
    return "|".join(str(cores[rank * len(cores) // tp if len(cores) < tp else rank]) for rank in range(tp))
