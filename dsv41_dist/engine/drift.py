"""Has the engine drifted from the release an adapter was written for? Compares sources, imports nothing. Torch-free.

`releases/<release>.json` holds, for every target, where it lives, its signature, its fingerprint and one short hash
for each logical line: enough to show what changed without storing the engine's text.
"""

from __future__ import annotations

import difflib
import gc
import hashlib
import json
import re
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from .symbols import LogicalLine, Symbol, Target, find
from .tree import PACKAGE, UNKNOWN, EngineNotFound, EngineTree

__all__ = ["Finding", "check", "digest", "known_releases", "record", "recorded", "write"]

FOLDER = Path(__file__).parent / "releases"
_CONTEXT, _SHOWN = 2, 40
_NUMBER = re.compile(r"[0-9]+")


class Finding(NamedTuple):
    """What was found for one target: status is `same`, `drifted`, `absent` or `unknown release`."""

    target: Target
    status: str
    detail: str = ""
    diff: tuple[str, ...] = ()
    fingerprint: str = ""


def known_releases() -> list[str]:
    """The releases whose fingerprints are recorded, by the numbers in their names (an rc comes after its release)."""
    return sorted(
        (file.stem for file in FOLDER.glob("*.json")), key=lambda text: [int(n) for n in _NUMBER.findall(text)]
    )


@lru_cache(maxsize=8)
def recorded(release: str) -> Mapping[str, Any] | None:
    """The recorded symbols of a release by key (`module:qualname`), or None for a release that is not known."""
    file = FOLDER / f"{release}.json"
    if "/" in release or not file.is_file():
        return None
    return json.loads(file.read_text("utf-8"))["symbols"]


def check(
    tree: EngineTree, targets: Iterable[Target], reference: Callable[[str], EngineTree | None] | None = None
) -> list[Finding]:
    """One finding per target that is for this tree's release, in order.

    `reference` may give a tree of the same release as published, so that removed lines can be shown as text; it is
    used only where its fingerprint is the recorded one.
    """
    known = recorded(tree.release)
    targets = [target for target in targets if known is None or target.is_for(tree.release)]
    if known is None:
        text = f"release {tree.version} is not among {', '.join(known_releases())}"
        return [Finding(target, "unknown release", text) for target in targets]
    with _no_collection():
        found = _symbols(tree, targets)
    return [_one(target, found.get(target.key), known.get(target.key), tree, reference) for target in targets]


def digest(findings: Sequence[Finding]) -> str:
    """16 hex digits over the fingerprints found: equal on two ranks only if all these symbols are."""
    facts = sorted((f.target.key, f.fingerprint or f.status) for f in findings)
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


@contextmanager
def _no_collection() -> Generator[None]:
    """Parsing allocates much and leaves nothing; a full collection of the engine's heap would cost more than it."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _symbols(tree: EngineTree, targets: Iterable[Target]) -> dict[str, Symbol]:
    names: dict[str, list[str]] = {}
    for target in targets:
        names.setdefault(target.module, []).append(target.qualname)
    out: dict[str, Symbol] = {}
    for module, qualnames in names.items():
        file = tree.read(module)
        if file is not None:
            try:
                symbols = find(file[1], qualnames)
            except SyntaxError:
                continue  # a file that is not Python has none of the symbols
            out.update({f"{module}:{name}": symbol for name, symbol in symbols.items()})
    return out


def _one(
    target: Target,
    symbol: Symbol | None,
    entry: Mapping[str, Any] | None,
    tree: EngineTree,
    reference: Callable[[str], EngineTree | None] | None,
) -> Finding:
    if entry is None:
        return Finding(target, "unknown release", f"{target.key} was never recorded for {tree.release}")
    where = f"{entry['file']}:{entry['line']}"
    if symbol is None:
        return Finding(target, "absent", f"{target.key} is not in this engine (published at {where})")
    if symbol.fingerprint == entry["fingerprint"]:
        return Finding(target, "same", where, fingerprint=symbol.fingerprint)
    detail = f"{target.key} differs from the published {tree.release} ({where}; here at line {symbol.line})"
    if symbol.signature != entry["signature"]:
        detail += f"; signature {symbol.signature}, published {entry['signature']}"
    published = reference(tree.release) if reference is not None else None
    stock = _symbols(published, [target]).get(target.key) if published is not None else None
    if stock is not None and stock.fingerprint != entry["fingerprint"]:
        stock = None
    diff = _diff(entry["lines"].split(), stock.lines if stock else None, symbol.lines)
    return Finding(target, "drifted", detail, tuple(diff), symbol.fingerprint)


def _diff(hashes: list[str], stock: Sequence[LogicalLine] | None, found: Sequence[LogicalLine]) -> list[str]:
    """Unified: ` ` unchanged, `+` only here, `-` only in the published release (its text where a reference has it)."""
    out: list[str] = []
    matcher = difflib.SequenceMatcher(None, hashes, [line.digest for line in found], autojunk=False)
    for group in matcher.get_grouped_opcodes(_CONTEXT):
        out.append(
            f"@@ published line {group[0][1] + 1} of the function, here file line {_line(found, group[0][3])} @@"
        )
        for tag, i1, i2, j1, j2 in group:
            if tag == "equal":
                out.extend(_rows(" ", found[j1:j2]))
                continue
            if i2 > i1:
                missing = f"-({i2 - i1} published logical line(s); their text is not stored here)"
                out.extend(_rows("-", stock[i1:i2]) if stock else [missing])
            out.extend(_rows("+", found[j1:j2]))
    return out if len(out) <= _SHOWN else [*out[:_SHOWN], f"… {len(out) - _SHOWN} more lines"]


def _line(found: Sequence[LogicalLine], index: int) -> int:
    return found[min(index, len(found) - 1)].line


def _rows(mark: str, lines: Iterable[LogicalLine]) -> list[str]:
    return [mark + row for line in lines for row in line.text.split("\n")]


def record(wheel: Path, targets: Iterable[Target]) -> dict[str, Any]:
    """The content of `releases/<release>.json` for one published wheel.

    Raises EngineNotFound when the file is not an engine wheel or does not say its version, ValueError when a target of
    its release is not in it.
    """
    tree = EngineTree.at(wheel)
    if tree.version == UNKNOWN:
        raise EngineNotFound(f"{wheel} does not say its version: record a published {PACKAGE} wheel")
    wanted = sorted({target.key: target for target in targets if target.is_for(tree.release)}.items())
    found = _symbols(tree, [target for _, target in wanted])
    missing = [key for key, _ in wanted if key not in found]
    if missing:
        raise ValueError(f"{wheel.name} has no {', '.join(missing)}: narrow the target's releases")
    symbols: dict[str, Any] = {}
    for key, target in wanted:
        symbol, file = found[key], tree.read(target.module)
        assert file is not None
        symbols[key] = {
            "file": file[0],
            "line": symbol.line,
            "kind": symbol.kind,
            "signature": symbol.signature,
            "fingerprint": symbol.fingerprint,
            "lines": " ".join(line.digest for line in symbol.lines),
        }
    return {"release": tree.release, "symbols": symbols}


def write(wheel_dir: Path, targets: Sequence[Target], folder: Path = FOLDER) -> list[Path]:
    """Record every `sglang-*.whl` of a folder into `folder`. Raises EngineNotFound when there is none."""
    wheels = sorted(Path(wheel_dir).glob("sglang-*.whl"))
    if not wheels:
        raise EngineNotFound(f"no sglang-*.whl in {wheel_dir}: pip download --no-deps sglang==0.5.23 -d {wheel_dir}")
    out: list[Path] = []
    for wheel in wheels:
        content = record(wheel, targets)
        file = folder / f"{content['release']}.json"
        file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        out.append(file)
    recorded.cache_clear()
    return out
