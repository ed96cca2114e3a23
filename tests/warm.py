"""Processes that start warm: forked from an interpreter that has already imported what is slow to import.

A test that asks what a program says and how it ends should not pay, each time, for imports that it does not test:
torch, or what the engine imports beside itself. `Warm` starts one interpreter that imports those, and forks it for
every process. The child takes environment, `sys.path`, arguments, output files and working folder as a fresh
interpreter would, runs `sitecustomize` from its path, then the program as `__main__`, and ends as Python ends.

Only third-party packages may be imported early: whatever the tests change or look at is imported by the child. What a
test needs of a real start (options, PYTHONPATH as Python reads it) is not here: such a test starts a real process.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import runpy
import select
import signal
import site
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["Warm", "WarmProcess"]

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.02
_START_S = 120.0


class Warm:
    """The interpreter `python` with `preload` imported, as a context manager; leaving it ends what still runs.

    A package of `preload` that is not installed is left out. `env` is what the early imports see, PYTHONPATH too.
    """

    def __init__(self, python: str, preload: Sequence[str], env: Mapping[str, str]) -> None:
        self._command = [python, __file__, json.dumps(list(preload))]
        self._env = dict(env)
        self._unread = b""
        self._said: dict[str, int] = {}
        self._started = 0

    def __enter__(self) -> Warm:
        self._folder = tempfile.TemporaryDirectory(prefix="warm-")
        self._server = subprocess.Popen(
            self._command, env=self._env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        self._said_within("ready", _START_S)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.close()  # the server ends, and its children with it
        self._server.wait(10)
        self._server.stdout.close()
        self._folder.cleanup()

    def start(self, args: Sequence[str | Path], env: Mapping[str, str], cwd: str | Path | None = None) -> WarmProcess:
        """Start `python *args`: a script, `-c CODE` or `-m MODULE`, with their arguments."""
        assert self._server.stdin is not None
        self._started += 1
        base = Path(self._folder.name) / str(self._started)
        request = {"number": self._started, "args": [*map(str, args)], "env": dict(env)}
        request |= {"cwd": str(cwd or os.getcwd()), "out": f"{base}.out", "err": f"{base}.err"}
        self._server.stdin.write(json.dumps(request).encode() + b"\n")
        self._said_within(f"pid {self._started}", _START_S)
        return WarmProcess(self, self._started, base)

    def run(
        self, args: Sequence[str | Path], env: Mapping[str, str], timeout: float = 150, cwd: str | Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """As subprocess.run with its output captured as text."""
        return self.start(args, env, cwd).complete(timeout)

    def _said_within(self, what: str, seconds: float) -> int:
        deadline = time.monotonic() + seconds
        while what not in self._said:
            if self._server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{self._command[0]} as a warm interpreter: no {what!r} within {seconds:g} s")
            self._listen(_POLL_S)
        return self._said[what]

    def _listen(self, seconds: float) -> None:
        """Take in what the server has said: `ready`, the process of a number, how a number ended."""
        assert self._server.stdout is not None
        while select.select([self._server.stdout], [], [], seconds)[0]:
            data = os.read(self._server.stdout.fileno(), 65536)
            if not data:
                return
            *lines, self._unread = (self._unread + data).split(b"\n")
            for line in lines:
                what, _, value = line.decode().rpartition(" ")
                self._said[what] = int(value)
            seconds = 0.0


class WarmProcess:
    """One of its processes; the methods are those of subprocess.Popen with text output."""

    def __init__(self, warm: Warm, number: int, base: Path) -> None:
        self.pid = warm._said[f"pid {number}"]
        self._warm, self._number, self._base = warm, number, base

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        self._warm._listen(0.0)
        return self._warm._said.get(f"status {self._number}")

    def wait(self, timeout: float) -> int:
        """The exit status. Raises subprocess.TimeoutExpired."""
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            self._warm._listen(_POLL_S)
        return status

    def kill(self) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def communicate(self, timeout: float = 10) -> tuple[str, str]:
        """(stdout, stderr) once it has ended."""
        self.wait(timeout)
        return self._base.with_suffix(".out").read_text(), self._base.with_suffix(".err").read_text()

    def complete(self, timeout: float = 150) -> subprocess.CompletedProcess[str]:
        """How it ended and what it said. Raises subprocess.TimeoutExpired after a kill."""
        try:
            return subprocess.CompletedProcess(str(self.pid), self.wait(timeout), *self.communicate())
        except subprocess.TimeoutExpired:
            self.kill()
            raise


def _serve() -> dict[str, Any] | None:
    """Fork for each line of stdin. Returns its request in a child, None in the server once stdin ends."""
    woken, wake = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    numbers: dict[int, int] = {}
    unread = b""
    os.write(1, b"ready 0\n")
    while True:
        ready = select.select([0, woken], [], [])[0]
        if woken in ready:
            os.read(woken, 4096)
            for pid in list(numbers):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    said = f"status {numbers.pop(pid)} {os.waitstatus_to_exitcode(status)}\n"
                    os.write(1, said.encode())
        if 0 in ready:
            data = os.read(0, 65536)
            if not data:
                return None
            *lines, unread = (unread + data).split(b"\n")
            for line in lines:
                request = json.loads(line)
                server = os.getpid()
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    os.close(woken)
                    os.close(wake)
                    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                    return request if os.getppid() == server else None
                numbers[pid] = request["number"]
                os.write(1, f"pid {request['number']} {pid}\n".encode())


def _become(request: dict[str, Any], path: list[str]) -> None:
    """What a fresh interpreter is before its program: files, folder, environment, sys.path, sitecustomize."""
    files = [os.open(os.devnull, os.O_RDONLY)]
    files += [os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600) for name in ("out", "err")]
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    first = {"-c": "", "-m": request["cwd"]}.get(request["args"][0], os.path.dirname(request["args"][0]))
    sys.path[:] = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *path]
    importlib.invalidate_caches()
    sys.modules.pop("sitecustomize", None)
    site.execsitecustomize()
    sys.path.insert(0, first)


def _main() -> None:
    """The server, and every program that it starts: a child goes on from here, and ends as Python ends."""
    del sys.path[0]  # the folder of this file
    ours = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    path = [entry for entry in sys.path if entry not in ours]
    for name in json.loads(sys.argv[1]):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    request = _serve()
    if request is None:
        os._exit(0)
    _become(request, path)
    kind, *rest = request["args"]
    if kind == "-m":
        sys.argv[:] = ["-m", *rest[1:]]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv[:] = ["-c", *rest[1:]]
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    else:
        sys.argv[:] = [kind, *rest]
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    _main()
