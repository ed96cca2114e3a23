"""The RDMA proxy of the published b12x wheel, its C source unmodified, over a libibverbs stand-in (c/fake_verbs.c)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from dsv41_dist.engine.survey import cache_folder

from .wheels import source

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[3]
SIZES = (16, 48, 1040, 65536, 16, 1 << 20, 1 << 20, 4112)


def includes() -> Path | None:
    """Where infiniband/verbs.h is; fetched as a Debian package and unpacked into the cache when it is not installed."""
    if Path("/usr/include/infiniband/verbs.h").is_file():
        return None
    folder = cache_folder() / "verbs"
    if not (folder / "usr/include/infiniband/verbs.h").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        try:
            command = ["apt-get", "download", "-q", "libibverbs-dev"]
            subprocess.run(command, cwd=folder, capture_output=True, timeout=100, check=True)
            package = next(folder.glob("libibverbs-dev_*.deb"))
            subprocess.run(["dpkg-deb", "-x", package, folder], capture_output=True, timeout=60, check=True)
        except (OSError, subprocess.SubprocessError, StopIteration) as error:
            pytest.skip(f"NOT TESTED: infiniband/verbs.h is missing and apt-get cannot fetch libibverbs-dev ({error})")
    return folder / "usr/include"


@pytest.fixture(scope="module", params=["1.5.1"])
def library(request, tmp_path_factory):
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc")
    if not compiler:
        pytest.skip("NOT TESTED: no C compiler here (CC, gcc, cc), and the proxy is C")
    folder = tmp_path_factory.mktemp("proxy")
    proxy = folder / "_roce_proxy.c"
    proxy.write_text(source(request.param, "b12x/comm/roce/_roce_proxy.c"))
    headers = includes()
    target = folder / "proxy.so"
    # As the wheel builds it, but for the library it links with.
    command = [compiler, "-O2", "-std=gnu11", "-shared", "-fPIC", "-o", target, proxy, HERE / "c/fake_verbs.c"]
    command += ["-lpthread", *([f"-I{headers}"] if headers else [])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return target


def run(library, world, hcas, **rank_1):
    with tempfile.TemporaryDirectory(prefix="dsv41-verbs-", dir="/dev/shm") as folder:
        ranks = []
        for rank in range(world):
            numbers = [str(n) for n in (rank, world, hcas)]
            args = [str(library), *numbers, folder, str(1 << 20), ",".join(map(str, SIZES))]
            env = {**os.environ, **(rank_1 if rank == 1 else {})}
            command = [sys.executable, "-m", "tests.unit.roce.proxy_rank", *args]
            ranks.append(subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True))
        try:
            return [json.loads(process.communicate(timeout=100)[0]) for process in ranks]
        finally:
            for process in ranks:
                process.kill()


@pytest.mark.parametrize(("world", "hcas"), [(2, 1), (2, 2), (3, 2), (4, 1), (4, 2)])
def test_every_shard_arrives_byte_for_byte(library, world, hcas):
    for result in run(library, world, hcas):
        assert result == {"done": len(SIZES), "wrong": 0, "error": "", "posted": len(SIZES)}


def test_a_write_that_fails_ends_in_an_error_that_names_the_peer(library):
    said = run(library, 3, 2, SIM_FAIL_AT="9")
    assert "RDMA write to rank" in said[1]["error"]
    assert "transport retry counter exceeded" in said[1]["error"]
    assert all(one["error"] and one["wrong"] == 0 for one in said)
    assert any("waiting for rank 1, HCA" in one["error"] for one in (said[0], said[2]))


def test_a_write_that_is_lost_ends_in_a_bounded_wait_that_names_peer_and_hca(library):
    said = run(library, 3, 2, SIM_DROP_FROM="17")
    assert all(one["error"] and one["wrong"] == 0 for one in said)
    assert any("waiting for rank 1, HCA" in one["error"] for one in (said[0], said[2]))
    assert all("proxy: ok" in one["error"] for one in said)  # nobody was told


def test_a_port_that_is_down_is_refused_at_set_up(library):
    with tempfile.TemporaryDirectory(prefix="dsv41-verbs-", dir="/dev/shm") as folder:
        args = [str(library), "0", "2", "1", folder, "4096", "16"]
        command = [sys.executable, "-m", "tests.unit.roce.proxy_rank", *args]
        env = {**os.environ, "SIM_PORT_DOWN": "1"}
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout)["error"] == "RDMA device sim0 port 1 is not active"
