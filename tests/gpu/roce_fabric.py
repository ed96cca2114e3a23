"""The published b12x runtime on GPUs without an RDMA card: its kernels and proxy over tests/unit/roce/c/fake_verbs.c.

    python -m tests.gpu.roce_fabric OUT WORLD SCENARIO,SCENARIO..      scenarios: see roce_rank.py

Builds the libibverbs stand-in as a library that b12x's proxy links with, makes one folder per rank that looks like a
host with two cards, starts WORLD ranks, and writes OUT/roce_<scenarios>_<world>.json. Exit code 1 when a rank failed.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from dsv41_dist.cli.environment import environment
from dsv41_dist.comm.settings import CommSettings
from tests.unit.roce.fake_host import host

ROOT = Path(__file__).parents[2]
DEVICES = ("sim0", "sim1")  # the names that the stand-in gives its cards
LIMIT_S = 240


def build(folder: Path, headers: str | None) -> Path:
    """The stand-in as libibverbs.so in a folder of its own."""
    target = folder / "verbs" / "libibverbs.so"
    target.parent.mkdir()
    source = ROOT / "tests/unit/roce/c/fake_verbs.c"
    command = [
        "gcc",
        "-O2",
        "-std=gnu11",
        "-shared",
        "-fPIC",
        "-Wl,-soname,libibverbs.so",
        "-o",
        target,
        source,
        "-lpthread",
    ]
    subprocess.run([*command, *([f"-I{headers}"] if headers else [])], check=True, timeout=60)
    return target.parent


def rank_env(folder: Path, library: Path, headers: str | None, rank: int, world: int, port: int) -> dict[str, str]:
    def add(name: str, path: str) -> str:
        return os.pathsep.join([path, *filter(None, [os.environ.get(name)])])

    return {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        # NCCL must not take the stand-in for a network card.
        "NCCL_IB_DISABLE": "1",
        "NCCL_NVLS_ENABLE": "0",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "LIBRARY_PATH": add("LIBRARY_PATH", str(library)),
        "LD_LIBRARY_PATH": add("LD_LIBRARY_PATH", str(library)),
        # A libibverbs that torch's own libraries have loaded would be found first.
        "LD_PRELOAD": add("LD_PRELOAD", str(library / "libibverbs.so")),
        **({"CPATH": add("CPATH", headers)} if headers else {}),
        "B12X_ROCE_CACHE_DIR": str(folder / "proxy"),
        "SIM_FOLDER": str(folder),
        "SIM_RANK": str(rank),
        "DSV41_ROCE_ROOT": str(folder / "host{rank}"),
        "PATH": "/usr/bin:" + os.environ["PATH"],
    }


def run(world: int, scenarios: str, **extra: str) -> list[dict]:
    """Each rank's result: what its last line said, or its exit status and the end of its errors."""
    headers = os.environ.get("VERBS_INCLUDE")
    with tempfile.TemporaryDirectory(prefix="dsv41-roce-", dir="/dev/shm") as name, socket.socket() as probe:
        folder = Path(name)
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        library = build(folder, headers)
        ranks = []
        for rank in range(world):
            host(folder / f"host{rank}", rank, DEVICES)
            env = {**rank_env(folder, library, headers, rank, world, port), **extra}
            command = [sys.executable, "-m", "tests.gpu.roce_rank", scenarios]
            log = (folder / f"log{rank}").open("w+")
            ranks.append(
                (subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=log, text=True), log)
            )
        out, deadline = [], time.monotonic() + LIMIT_S
        try:
            for process, log in ranks:
                try:
                    said = process.communicate(timeout=max(1.0, deadline - time.monotonic()))[0]
                except subprocess.TimeoutExpired:
                    process.kill()
                    said = process.communicate()[0]
                log.seek(0)
                line = said.strip().rpartition("\n")[2]
                result = json.loads(line) if line.startswith("{") else {}
                if process.returncode:
                    result.update(exit=process.returncode, stderr=log.read()[-6000:])
                out.append(result)
        finally:
            for process, _ in ranks:
                process.kill()
    return out


def main() -> None:
    folder, world, scenarios = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    if not shutil.which("gcc"):
        sys.exit("gcc is not installed")
    folder.mkdir(parents=True, exist_ok=True)
    extra = dict(word.split("=", 1) for word in sys.argv[4:])
    started = time.monotonic()
    ranks = run(world, scenarios, **extra)
    block = environment(world, "own", "cuda", CommSettings())
    result = {"environment": block, "world": world, "scenarios": scenarios, "set": extra, "ranks": ranks}
    result["seconds"] = round(time.monotonic() - started, 1)
    path = folder / f"roce_{scenarios.replace(',', '_')}_{world}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    for rank, said in enumerate(ranks):
        print(f"rank {rank}: {json.dumps(said)[:3000]}")
    print(f"{path.name}: {result['seconds']} s")
    sys.exit(any(said.get("exit") for said in ranks))


if __name__ == "__main__":
    main()
