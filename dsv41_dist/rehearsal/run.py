"""Boots the engine in processes of its own interpreter, watches them, and leaves none behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from .settings import PACKAGE_ROOT, TAG, Boot, engine_environment
from .stand_ins.on_gpu import USED
from .verdict import Outcome

__all__ = ["boot_engine", "make_checkpoint", "processes_of"]

_POLL_S = 0.2
_END_S = 5.0  # how long the engine has to end by itself once a rank is lost
_REFUSAL = re.compile(r"dsv41_dist refuses to go on.*?(?=\ndsv41_dist refuses|\nTraceback|\n\S*\n|\n\[|\Z)", re.DOTALL)

_ERROR = re.compile(r"\s*[\w.]*(Error|Exit|Exception|Timeout|Unavailable)\b.*:")


def make_checkpoint(python: str, folder: Path, seed: int) -> Path:
    """Write the tiny checkpoint with the engine's interpreter (it has safetensors); nothing to do if it is there."""
    code = (
        "import sys, torch; torch.set_num_threads(1); from dsv41_dist.rehearsal.tiny_model import write_checkpoint; "
        "write_checkpoint(sys.argv[1], seed=int(sys.argv[2]))"
    )
    env = {**os.environ, "PYTHONPATH": str(PACKAGE_ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [python, "-c", code, str(folder), str(seed)], env=env, capture_output=True, text=True, timeout=300, check=False
    )
    if done.returncode:
        reason = done.stderr.strip().rpartition("\n")[2]
        raise RuntimeError(f"the checkpoint could not be written to {folder}: {reason}")
    return folder


def boot_engine(
    python: str,
    boot: Boot,
    name: str,
    *,
    timeout_s: float = 600.0,
    folder: Path | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Outcome:
    """Start an engine, run its stages, end it. Never raises for what the engine does: see Outcome.problem.

    `python` has the engine. `folder` receives logs and records (a temporary one by default). KeyboardInterrupt passes
    through, after every process of the run is gone.
    """
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="rehearsal-") as temporary:
            return boot_engine(python, boot, name, timeout_s=timeout_s, folder=Path(temporary), say=say)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "boot.json").write_text(json.dumps(boot.as_json()))
    outcome = Outcome(name, boot.tp)
    start = time.monotonic()
    with _engine(python, boot, folder) as process:
        _watch(process, folder, outcome, start + timeout_s, say)
    outcome.seconds = time.monotonic() - start
    _collect(folder, outcome)
    return outcome


@contextmanager
def _engine(python: str, boot: Boot, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    run = uuid.uuid4().hex
    command = [python, "-m", "dsv41_dist.rehearsal.worker", str(folder)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command,
            env=engine_environment(boot, folder, run),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            _end(process, run)


def _watch(
    process: subprocess.Popen[bytes], folder: Path, outcome: Outcome, deadline: float, say: Callable[[str], None]
) -> None:
    """Read the events until the engine has ended, a rank is lost, or the time is up."""
    schedulers: dict[str, int] = {}
    seen, done = 0, False
    while True:
        # Before the events: ranks that end after "done" are not lost, however long the events take to say.
        ended = process.poll() is not None
        gone = [(rank, pid) for rank, pid in sorted(schedulers.items()) if not _lives(pid)]
        events = _lines(folder / "events.jsonl")
        for event in events[seen:]:
            kind = event["event"]
            if kind == "ready":
                schedulers = event["ranks"]
                outcome.seconds_to_ready, outcome.version = event["seconds"], event["version"]
                pids = ", ".join(f"rank {rank}: {pid}" for rank, pid in sorted(schedulers.items()))
                say(f"{outcome.name}: ready after {event['seconds']:.0f} s ({pids})")
                if sorted(schedulers) != sorted(map(str, range(outcome.tp))):
                    found = ", ".join(sorted(schedulers)) or "none"
                    # Without its process a lost rank would go unseen until the time is up.
                    outcome.problem = f"TP{outcome.tp}, and the scheduler processes of these ranks were found: {found}"
                    return
            elif kind == "stage":
                outcome.stages.append(event)
                tokens = sum(map(len, event["tokens"]))
                say(f"{outcome.name}: {event['name']}: {tokens} tokens, {event['seconds']:.0f} s")
            elif kind == "done":
                done = True
        seen = len(events)
        if gone and not done:
            ranks = ", ".join(f"rank {rank} (process {pid})" for rank, pid in gone)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
            # Often an exception: the engine then ends all its processes, and only the log says why.
            reason = _reason(folder)
            outcome.problem = f"lost {ranks}: its scheduler process ended while requests were running: {reason}"
            return
        if ended:
            if not done or process.returncode:
                outcome.problem = f"the engine ended with status {process.returncode}: {_reason(folder)}"
            return
        if time.monotonic() > deadline:
            outcome.problem = f"the engine did not finish in time; the last lines of its log: {_tail(folder)}"
            return
        time.sleep(_POLL_S)


def _end(process: subprocess.Popen[bytes], run: str) -> None:
    """Kill what is left of a run: the engine's session, and whatever carries its tag."""
    for _ in range(3):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        left = processes_of(run)
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
        if not left:
            return
        time.sleep(0.1)


def processes_of(run: str) -> list[int]:
    """Live processes whose environment carries this run's tag."""
    tag = f"{TAG}={run}".encode()
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):
                if tag in (entry / "environ").read_bytes().split(b"\0") and _lives(int(entry.name)):
                    found.append(int(entry.name))
    return found


def _lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def _collect(folder: Path, outcome: Outcome) -> None:
    for file in folder.glob("rank*.jsonl"):
        outcome.ranks[int(file.stem.removeprefix("rank"))] = _lines(file)
    used = folder / USED
    if used.is_file():
        found = json.loads(used.read_text())
        outcome.stand_ins, outcome.absent = found["used"], found["absent"]
    report = folder / "boot_report.json"
    if report.is_file():
        outcome.boot_report = json.loads(report.read_text())
    last = [entries[-1].get("fired", {}) for _, entries in sorted(outcome.ranks.items()) if entries]
    outcome.cpu_s = sum(entries[-1].get("cpu_s", 0.0) for entries in outcome.ranks.values() if entries)
    for adapter in last[0] if last else []:
        outcome.fired[adapter] = [counts.get(adapter, 0) for counts in last]
    forwards = [entry for entry in outcome.ranks.get(0, []) if not entry["draft"]]
    for entry in forwards:
        for call, count in entry.get("collectives", {}).items():
            outcome.collectives[call] = outcome.collectives.get(call, 0.0) + count / len(forwards)
    outcome.log = _tail(folder, 40)


def _lines(file: Path) -> list[dict[str, Any]]:
    """The complete JSON lines of a file that is being written; none if it is not there."""
    try:
        text = file.read_text()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def _reason(folder: Path) -> str:
    """The adapters' refusal if there is one, else the last error line of the log.

    The ranks that lose their peer say so after the one that failed: theirs is the reason only if there is no other.
    """
    text = (folder / "log").read_text(errors="replace")
    refusal = _REFUSAL.search(text)
    if refusal:
        return refusal[0].strip()
    errors = [line.strip() for line in text.splitlines() if _ERROR.match(line)]
    own = [line for line in errors if "Connection " not in line]
    return (own or errors or [_tail(folder)])[-1] or "no log"


def _tail(folder: Path, lines: int = 5) -> str:
    text = (folder / "log").read_text(errors="replace")
    return "\n".join([line for line in text.splitlines() if line.strip()][-lines:])
