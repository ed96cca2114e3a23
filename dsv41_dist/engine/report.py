"""How the boot report looks. Torch-free."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from typing import Any

from .refusal import say

__all__ = ["text_table", "write_json"]


def text_table(report: Mapping[str, Any]) -> str:
    """The report as aligned text, one line per adapter."""
    head = f"dsv41_dist {report['dsv41_dist']} on SGLang {report['engine_release']}, {report['ranks']} rank(s) agree"
    rows: list[tuple[str, ...]] = [("adapter", "state", "guarantee", "patched", "copies", "fired", "memory bytes")]
    for entry in report["adapters"]:
        counts = (len(entry["patched"]), entry["rebound_copies"], entry["fired"], entry["memory_bytes"])
        rows.append((entry["adapter"], entry["state"], entry["guarantee"], *map(str, counts)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    notes = [f"{entry['adapter']}: {note}" for entry in report["adapters"] for note in entry["notes"]]
    return "\n".join([head, *lines, *notes])


def write_json(path: str, report: Mapping[str, Any]) -> None:
    """Write atomically; a report that cannot be written is said and does not end the server."""
    partial = f"{path}.{os.getpid()}.partial"
    try:
        with open(partial, "w", encoding="utf-8") as file:
            file.write(json.dumps(report, indent=1) + "\n")
        os.replace(partial, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        say(f"dsv41_dist: DSV41_BOOT_REPORT={path!r} cannot be written: {error}")
