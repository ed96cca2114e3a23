"""Refusing: one paragraph, SystemExit, and a latch that stays for the process. Torch-free.

SGLang's plugin loader and its model registry log and swallow `Exception`; `SystemExit` passes through them. What
swallows even that meets the latch: a later import of a watched module, the agreement over the TP group and the door
to serving all refuse again.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from typing import NoReturn

__all__ = ["Refusal", "latched", "refuse", "refuse_again", "say"]


class Refusal(SystemExit):
    """Ends the process with status 1. Its text is the paragraph, which was printed when it was first raised."""

    def __init__(self, paragraph: str) -> None:
        super().__init__(1)
        self.paragraph = paragraph

    def __str__(self) -> str:
        return self.paragraph


_first: list[str] = []
_lock = threading.Lock()


def latched() -> str | None:
    """The paragraph this process was refused with, or None."""
    return _first[0] if _first else None


def refuse(what: str, todo: str) -> NoReturn:
    """End this process: `what` is wrong, `todo` says what to do. The first refusal of a process is the one it keeps."""
    what = what.rstrip(". \n")
    paragraph = f"dsv41_dist refuses to go on: {what}" + ("\n" if "\n" in what else ". ") + todo
    with _lock:
        if not _first:
            _first.append(paragraph)
    say(paragraph)
    raise Refusal(paragraph)


def refuse_again() -> None:
    """Raise the first refusal of this process again; return if there was none."""
    if _first:
        say(_first[0])
        raise Refusal(_first[0])


def say(text: str) -> None:
    """Print on stderr, if that can be written: a full disk must not put another exception in a refusal's place."""
    # Not through logging: the engine may not have configured it yet, and must not be able to filter this.
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)
