"""The command line in processes of its own, with and without launchers."""

import atexit
import functools
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dsv41_dist.cli.app import main
from tests.warm import Warm

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
MPIRUN = BIN / "mpirun" if (BIN / "mpirun").exists() else Path("mpirun")
CLEAN = {k: v for k, v in os.environ.items() if not k.startswith(("DSV41_", "OMPI_", "PMIX_", "RANK", "WORLD_SIZE"))}
CLEAN |= {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}


@functools.cache
def _warm():
    warm = Warm(sys.executable, ["torch.distributed.run", "numpy", "typer", "rich.table"], CLEAN)
    atexit.register(warm.__exit__)
    return warm.__enter__()


def cli(*arguments, **env):
    """`python -m dsv41_dist ARGUMENTS`, with torch imported already; its ranks import it themselves."""
    return _warm().run(["-m", "dsv41_dist", *map(str, arguments)], {**CLEAN, **env}, 100, ROOT)


def torchrun(size, *arguments, **env):
    """ARGUMENTS under torchrun. The launcher has imported torch already; its ranks are started from nothing."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    return _warm().run([*launcher, str(size), *map(str, arguments)], {**CLEAN, **env}, 100, ROOT)


def cold_cli(*arguments, **env):
    """`cli` started from nothing."""
    return _run(sys.executable, "-m", "dsv41_dist", *arguments, **env)


def mpirun(size, *arguments, **env):
    return _run(MPIRUN, "--oversubscribe", "-np", size, sys.executable, *arguments, **env)


def _run(*command, **env):
    return subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=100, cwd=ROOT, env={**CLEAN, **env}
    )


def refused(arguments, text, monkeypatch, capsys):
    """The command ends with 2 and one line that has `text`, before any rank is started."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["dsv41_dist", *arguments])
    started = multiprocessing.active_children()
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr()
    assert ended.value.code == 2
    assert text in said.err
    assert len(said.err.strip().splitlines()) == 1
    assert said.out == ""
    assert multiprocessing.active_children() == started
