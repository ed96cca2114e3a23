"""What a gate's value may look like. One class per grammar; each parses a text or says what is allowed. Torch-free."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Protocol

__all__ = ["BadValue", "Choice", "Flag", "Float", "Int", "Kind", "Names", "Path", "VerifyCap"]

_ON, _OFF = ("1", "on", "true"), ("0", "off", "false")


class BadValue(ValueError):
    """The text is outside the grammar. The message is not shown: `Kind.allowed` is."""


class Kind(Protocol):
    """A grammar. `parse` takes the stripped, non-empty text and gives a JSON-able value or raises BadValue."""

    @property
    def allowed(self) -> str: ...

    def parse(self, text: str) -> Any: ...


class Flag(NamedTuple):
    """On or off; the value is a bool."""

    @property
    def allowed(self) -> str:
        return "1/on/true or 0/off/false"

    def parse(self, text: str) -> bool:
        word = text.lower()
        if word in _ON:
            return True
        if word in _OFF:
            return False
        raise BadValue(text)


class Choice(NamedTuple):
    """One of a few words; the value is the word. `flags` maps on/off words first (`1` and `0` in `words`)."""

    words: tuple[str, ...]

    @property
    def allowed(self) -> str:
        return " or ".join(self.words)

    def parse(self, text: str) -> str:
        word = text.lower()
        if word in self.words:
            return word
        for group, plain in ((_ON, "1"), (_OFF, "0")):
            if word in group and plain in self.words:
                return plain
        raise BadValue(text)


class Int(NamedTuple):
    """A whole number in decimal, from `low` to `high` inclusive; `unit` is for the reader."""

    low: int
    high: int
    unit: str = ""

    @property
    def allowed(self) -> str:
        return f"a whole number{' of ' + self.unit if self.unit else ''} from {self.low} to {self.high}"

    def parse(self, text: str) -> int:
        if not text.isascii() or not text.isdigit():
            raise BadValue(text)
        try:
            value = int(text)
        except ValueError:  # more digits than Python converts
            raise BadValue(text) from None
        if not self.low <= value <= self.high:
            raise BadValue(text)
        return value


class Float(NamedTuple):
    """A finite number from `low` to `high` inclusive."""

    low: float
    high: float
    unit: str = ""

    @property
    def allowed(self) -> str:
        return f"a number{' of ' + self.unit if self.unit else ''} from {self.low:g} to {self.high:g}"

    def parse(self, text: str) -> float:
        return _number(text, self.low, self.high)


class Path(NamedTuple):
    """A file or folder name; only emptiness and NUL are refused here."""

    @property
    def allowed(self) -> str:
        return "a path"

    def parse(self, text: str) -> str:
        if "\0" in text:
            raise BadValue(text)
        return text


class Names(NamedTuple):
    """A comma-separated list without repeats; the value is a list. `words` limits it, otherwise dotted identifiers that
    are no on/off word: `off` would turn the switch on, with a name that nothing has."""

    words: tuple[str, ...] = ()
    what: str = "names"

    @property
    def allowed(self) -> str:
        if self.words:
            return f"a comma-separated list of {', '.join(self.words)}"
        return f"a comma-separated list of {self.what} without repeats, such as wqkv_a,engram.wkv; unset is off"

    def parse(self, text: str) -> list[str]:
        parts = [part.strip() for part in text.split(",")]
        for part in parts:
            if self.words:
                good = part in self.words
            else:
                good = part.lower() not in _ON + _OFF and all(piece.isidentifier() for piece in part.split("."))
            if not good:
                raise BadValue(text)
        if len(set(parts)) != len(parts):
            raise BadValue(text)
        return parts


class VerifyCap(NamedTuple):
    """`0` (off), `1`..`5` verified drafts, `conf:t` (one threshold for drafts 2..5) or `conf:a,b,c,d` (one each).

    The value is 0, an int, or a list of four thresholds.
    """

    @property
    def allowed(self) -> str:
        return "0 (off), 1..5, conf:t or conf:a,b,c,d with thresholds from 0 to 1"

    def parse(self, text: str) -> int | list[float]:
        word = text.lower()
        if word in _OFF:
            return 0
        if word in ("1", "2", "3", "4", "5"):
            return int(word)
        head, colon, tail = word.partition(":")
        if head != "conf" or not colon:
            raise BadValue(text)
        thresholds = [_number(part.strip(), 0.0, 1.0) for part in tail.split(",")]
        if len(thresholds) == 1:
            thresholds *= 4
        if len(thresholds) != 4:
            raise BadValue(text)
        return thresholds


def _number(text: str, low: float, high: float) -> float:
    try:
        value = float(text)
    except ValueError:
        raise BadValue(text) from None
    if not math.isfinite(value) or not low <= value <= high:
        raise BadValue(text)
    return value
