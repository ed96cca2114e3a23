"""The boot report's file while the ranks run: the engine kills them, so nothing is written at their exit."""

from __future__ import annotations

import json
import sys
import threading
import time

from dsv41_dist.engine import armed, report
from dsv41_dist.engine.gates import Gates
from dsv41_dist.engine.state import AdapterState


def test_the_file_follows_the_counts_without_an_end(tmp_path, monkeypatch):
    file = tmp_path / "report.json"
    monkeypatch.setattr(armed, "_REFRESH_S", 0.02)
    process = armed.Armed(Gates.from_env({"DSV41_BOOT_REPORT": str(file)}), [])
    state = process.states["some"] = AdapterState("some", "bit-identical")
    thread = threading.Thread(target=process._keep_written, daemon=True)
    thread.start()
    for count in (1, 2):
        state.fire()
        state.notes.append(f"call {count}")
        deadline = time.monotonic() + 20
        while not file.is_file() or json.loads(file.read_text())["adapters"][0]["fired"] != count:
            assert time.monotonic() < deadline, "the report was not written again"
            time.sleep(0.01)
    assert json.loads(file.read_text())["adapters"][0]["notes"][0] == "call 1"
    process._end()
    thread.join(20)
    assert not thread.is_alive()
    assert list(tmp_path.iterdir()) == [file]


class Full:
    """A stderr on a disk that is full."""

    def write(self, text):
        raise OSError(28, "No space left on device")


def test_a_report_that_cannot_be_written_or_said_does_not_end_the_server(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "report.json"
    folder.mkdir()
    report.write_json(str(folder), {})
    assert f"DSV41_BOOT_REPORT={str(folder)!r} cannot be written" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [folder]
    monkeypatch.setattr(sys, "stderr", Full())
    report.write_json(str(folder), {})
