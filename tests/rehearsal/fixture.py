"""One engine boot per question: results are kept by a digest over the boot, its files and the engine's release.

    def test_something(rehearsals):
        stock = rehearsals.stock()
        adapted = rehearsals.adapted(DSV41_FOLDED_FENCE="1")
        assert compare(stock, adapted).problems == []

Kept on disk too (XDG_CACHE_HOME/dsv41_dist/rehearsal/results): a boot takes a minute, and the same code gives the same
bytes. Only boots without a problem are kept. Tests that want these import `rehearsals` from here.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import threading
import uuid
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from dsv41_dist.comm.errors import ArgumentError
from dsv41_dist.engine.survey import cache_folder
from dsv41_dist.rehearsal.run import boot_engine, make_checkpoint
from dsv41_dist.rehearsal.settings import PACKAGE_ROOT, Boot, default_stages
from dsv41_dist.rehearsal.tiny_model import checkpoint_folder
from dsv41_dist.rehearsal.verdict import Outcome

__all__ = ["Rehearsals", "Sessions", "printed", "rehearsal_python", "rehearsals"]


def printed(python: str, probe: str, timeout_s: int, *folders: str, **extra: str) -> dict:
    """The JSON in the last line that a probe of this folder prints, run by the engine's interpreter."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(PACKAGE_ROOT), *folders]), "PYTHONWARNINGS": "ignore"}
    env |= {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1", **extra}
    command = [python, str(Path(__file__).with_name(probe))]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


class Rehearsals:
    """Boots on demand. Keyword arguments are those of Boot; `gates` go to `adapted` by name."""

    def __init__(self, python: str) -> None:
        self.python = python
        self._release = subprocess.run(
            [python, "-c", "import importlib.metadata as m; print(m.version('sglang'), m.version('torch'))"],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout.strip()
        self._seen: dict[str, Outcome] = {}

    def checkpoint(self, seed: int = 1) -> str:
        return str(make_checkpoint(self.python, checkpoint_folder(cache_folder() / "rehearsal", seed), seed))

    def with_flipped(self, folder: Path, tensor: str, rows: range, seed: int = 1) -> str:
        """The default checkpoint with the sign of some rows of one tensor flipped, written to `folder`."""
        code = (
            "import sys, torch; torch.set_num_threads(1); from dsv41_dist.rehearsal import tiny_model as m; "
            "folder, name, first, last, seed = sys.argv[1:]; seed = int(seed); "
            "found = next(t for n, t in m.tensors(m.TinyConfig(), seed) if n == name).clone(); "
            "found.view(torch.uint8)[int(first):int(last)] ^= 0x80; "
            "m.write_checkpoint(folder, seed=seed, replaced={name: found})"
        )
        subprocess.run(
            [self.python, "-c", code, str(folder), tensor, str(rows.start), str(rows.stop), str(seed)],
            env={**os.environ, "PYTHONPATH": str(PACKAGE_ROOT), "OMP_NUM_THREADS": "1"},
            timeout=300,
            check=True,
        )
        return str(folder)

    def boot(self, **what) -> Boot:
        """A Boot with the default checkpoint and the ten short prompts unless told otherwise."""
        seed = what.pop("seed", 1)
        if "checkpoint" not in what:
            what["checkpoint"] = self.checkpoint(seed)
        return Boot(**{"stages": default_stages(long=False), **what})

    def stock(self, **what) -> Outcome:
        return self.run(self.boot(**what))

    def adapted(self, gates: dict[str, str] | None = None, /, **what) -> Outcome:
        named = {name: what.pop(name) for name in [n for n in what if n.startswith(("DSV41_", "SPARK_"))]}
        return self.run(self.boot(gates={**(gates or {}), **named}, **what))

    def run(self, boot: Boot) -> Outcome:
        key = self._key(boot)
        if key not in self._seen:
            self._seen[key] = self._kept(key) or self._boot(boot, key)
        return self._seen[key]

    def _boot(self, boot: Boot, key: str) -> Outcome:
        outcome = boot_engine(self.python, boot, "adapted" if boot.gates else "stock", timeout_s=900)
        if not outcome.problem:
            file = self._file(key)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(asdict(outcome)))
        return outcome

    def _kept(self, key: str) -> Outcome | None:
        try:
            data = json.loads(self._file(key).read_text())
        except (OSError, ValueError):
            return None
        return Outcome(**{**data, "ranks": {int(rank): entries for rank, entries in data["ranks"].items()}})

    def _key(self, boot: Boot) -> str:
        stamp = Path(boot.checkpoint) / "rehearsal.digest"
        elsewhere = replace(boot, checkpoint="")  # what is in it counts, not where it is
        digest = hashlib.sha256(f"{self._release} {elsewhere.digest()} {stamp.read_text()}".encode())
        # Whole folders: fingerprints and entry points decide as much as code does.
        for folder in (PACKAGE_ROOT / "dsv41_dist", *map(Path, boot.extra_path), *filter(None, [boot.tree])):
            for file in sorted(Path(folder).rglob("*")):
                if file.is_file() and "__pycache__" not in file.parts:
                    digest.update(f"{file.relative_to(folder)} {file.stat().st_size} ".encode() + file.read_bytes())
        return digest.hexdigest()[:24]

    @staticmethod
    def _file(key: str) -> Path:
        return cache_folder() / "rehearsal" / "results" / f"{key}.json"


class Sessions:
    """The sessions of the engines that are started while it is open with REHEARSED_BY=mark in their environment.

    An engine is a session of its own, and its ranks stay in it; they overwrite their environment with their title, so
    the mark is read off the processes that do not.
    """

    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex
        self._found: set[int] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Sessions:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def alive(self) -> list[int]:
        """Processes of these sessions now."""
        return [pid for pid, session in _sessions() if session in self._found]

    def _look(self) -> None:
        while not self._over.wait(0.3):
            for pid, session in _sessions():
                with contextlib.suppress(OSError):
                    environ = Path(f"/proc/{pid}/environ").read_bytes()
                    if session != os.getsid(0) and f"REHEARSED_BY={self.mark}".encode() in environ:
                        self._found.add(session)


def _sessions() -> list[tuple[int, int]]:
    """(process, session) of every process that is not a zombie."""
    out = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                state, _, _, session, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
                if state not in "ZX":
                    out.append((int(entry.name), int(session)))
    return out


@pytest.fixture(scope="session")
def rehearsal_python() -> str:
    """An interpreter that can boot the engine; without one the test is skipped, or fails under DSV41_REQUIRE_ENGINE."""
    from dsv41_dist.cli.rehearse import engine_python
    from tests.engine.conftest import missing

    try:
        return engine_python()
    except ArgumentError as error:
        missing(str(error))
        raise


@pytest.fixture(scope="session")
def rehearsals(rehearsal_python) -> Rehearsals:
    return Rehearsals(rehearsal_python)
