"""Engine functions by name, from source text alone: where they are, their signature and a fingerprint. Torch-free.

The fingerprint covers a definition's tokens, decorators included, without comments, docstrings and layout. Tokens and
not the AST: `ast.dump` differs between Python versions; bytes and not: a re-wrapped line is no change.
"""

from __future__ import annotations

import ast
import hashlib
import io
import tokenize
from collections.abc import Iterable, Iterator
from typing import NamedTuple

__all__ = ["LogicalLine", "Symbol", "Target", "find"]

_LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.ENCODING, tokenize.ENDMARKER}
# Python 3.12 splits f-strings (and 3.14 t-strings) into tokens; 3.11 has one STRING. They are joined again here.
_OPENERS = {getattr(tokenize, name) for name in ("FSTRING_START", "TSTRING_START") if hasattr(tokenize, name)}
_CLOSERS = {getattr(tokenize, name) for name in ("FSTRING_END", "TSTRING_END") if hasattr(tokenize, name)}

Node = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class Target(NamedTuple):
    """An engine function or class that an adapter patches, or relies on (`patched=False`).

    `qualname` is Python's `__qualname__`, so a function inside a function is `outer.<locals>.inner`. `releases`
    names the releases it is used in; empty means all.
    """

    module: str
    qualname: str
    releases: tuple[str, ...] = ()
    patched: bool = True

    @property
    def key(self) -> str:
        return f"{self.module}:{self.qualname}"

    def is_for(self, release: str) -> bool:
        return not self.releases or release in self.releases


class LogicalLine(NamedTuple):
    """One statement line: canonical text, the first physical line (1-based in the file), and the physical text."""

    canonical: str
    line: int
    text: str

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.canonical.encode()).hexdigest()[:6]


class Symbol(NamedTuple):
    """A definition as found in a source text. A name defined more than once (if/else, overloads) is one symbol."""

    qualname: str
    kind: str
    line: int
    signature: str
    lines: tuple[LogicalLine, ...]

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256("\n".join(line.canonical for line in self.lines).encode()).hexdigest()[:16]


def find(source: str, qualnames: Iterable[str]) -> dict[str, Symbol]:
    """The definitions of those names that the text has. Raises SyntaxError when the text is not Python."""
    wanted = set(qualnames)
    source = source.replace("\r\n", "\n")
    rows = source.split("\n")
    nodes: dict[str, list[Node]] = {}
    for qualname, node in _walk(ast.parse(source), ""):
        if qualname in wanted:
            nodes.setdefault(qualname, []).append(node)
    return {qualname: _symbol(qualname, found, rows) for qualname, found in nodes.items()}


def _walk(node: ast.AST, prefix: str) -> Iterator[tuple[str, Node]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Node):
            yield prefix + child.name, child
            inner = "." if isinstance(child, ast.ClassDef) else ".<locals>."
            yield from _walk(child, prefix + child.name + inner)
        elif not isinstance(child, (ast.expr, ast.arguments)):
            yield from _walk(child, prefix)


def _symbol(qualname: str, nodes: list[Node], rows: list[str]) -> Symbol:
    lines: list[LogicalLine] = []
    for node in nodes:
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        assert node.end_lineno is not None
        lines.extend(_logical_lines(rows[first - 1 : node.end_lineno], first))
    last = nodes[-1]
    if isinstance(last, ast.ClassDef):
        return Symbol(qualname, "class", nodes[0].lineno, "", tuple(lines))
    return Symbol(qualname, "function", nodes[0].lineno, _signature(last.args), tuple(lines))


def _signature(args: ast.arguments) -> str:
    """Parameter names and kinds; `=` marks a default. Enough to call by, and the same under every Python."""
    positional = [*args.posonlyargs, *args.args]
    bare = len(positional) - len(args.defaults)
    parts = [arg.arg + ("=" if index >= bare else "") for index, arg in enumerate(positional)]
    if args.posonlyargs:
        parts.insert(len(args.posonlyargs), "/")
    if args.vararg or args.kwonlyargs:
        parts.append("*" + (args.vararg.arg if args.vararg else ""))
    for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        parts.append(arg.arg + ("=" if default is not None else ""))
    if args.kwarg:
        parts.append("**" + args.kwarg.arg)
    return f"({', '.join(parts)})"


def _logical_lines(rows: list[str], first: int) -> Iterator[LogicalLine]:
    """Canonical lines of one definition; `first` is the file's line number of rows[0]."""
    # An indented definition is read inside `if 1:` so that dedenting cannot touch the inside of a string.
    indented = rows[0][:1] in (" ", "\t")
    shift = first - 1 - indented
    rows = ["if 1:", *rows] if indented else rows
    base = 2 if indented else 0
    depth = 0
    tokens: list[str] = []
    kinds: list[bool] = []  # whether each token is a plain string
    start = 0
    for kind, text, (row, _), (end_row, _) in _joined("\n".join(rows) + "\n", rows):
        if kind == tokenize.INDENT:
            depth += 1
        elif kind == tokenize.DEDENT:
            depth -= 1
        elif kind == tokenize.NEWLINE:
            docstring = all(kinds)
            head_of_wrapper = indented and depth == 0
            if tokens and not docstring and not head_of_wrapper:
                canonical = f"{depth - (base // 2)}\x1e" + "\x1f".join(_without_spare_commas(tokens))
                yield LogicalLine(canonical, start + shift, "\n".join(rows[start - 1 : end_row]))
            tokens, kinds = [], []
        elif kind not in _LAYOUT:
            if not tokens:
                start = row
            tokens.append(text)
            kinds.append(kind == tokenize.STRING and "f" not in text[: text.index(text[-1])].lower())


def _joined(text: str, rows: list[str]) -> Iterator[tuple[int, str, tuple[int, int], tuple[int, int]]]:
    """The tokenizer's output with f-strings as one token of their source text."""
    open_at: tuple[int, int] | None = None
    nested = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in _OPENERS:
            open_at = open_at or token.start
            nested += 1
        elif token.type in _CLOSERS:
            nested -= 1
            if nested == 0:
                assert open_at is not None
                yield tokenize.STRING, _slice(rows, open_at, token.end), open_at, token.end
                open_at = None
        elif nested == 0:
            yield token.type, token.string, token.start, token.end


def _slice(rows: list[str], start: tuple[int, int], end: tuple[int, int]) -> str:
    if start[0] == end[0]:
        return rows[start[0] - 1][start[1] : end[1]]
    middle = rows[start[0] : end[0] - 1]
    return "\n".join([rows[start[0] - 1][start[1] :], *middle, rows[end[0] - 1][: end[1]]])


def _without_spare_commas(tokens: list[str]) -> list[str]:
    """Drop the comma that a formatter adds before a closing bracket, where another comma at the same level makes it
    meaningless; `(a,)` keeps its comma, being a tuple."""
    out: list[str] = []
    commas = [0]
    for token in tokens:
        if token in ("(", "[", "{"):
            commas.append(0)
        elif token in (")", "]", "}"):
            if out[-1] == "," and commas[-1] > 1:
                out.pop()
            commas.pop()
        elif token == ",":
            commas[-1] += 1
        out.append(token)
    return out
