"""Engine functions whose choices by row count are made for the whole chunk: rewritten from the installed source.

`4096 <= x.shape[0] <= 65536` becomes `4096 <= logical_rows(x.shape[0]) <= 65536`. Only comparisons of a row count with
a number are touched: a grid, an allocation and `assert residual.shape == (x.shape[0], 4)` mean the rows that are there.
The function keeps its module's globals, so what it calls is what the engine calls. Torch-free.
"""

from __future__ import annotations
import __future__

import ast
import inspect
import textwrap
from collections.abc import Callable
from types import FunctionType
from typing import Any

from ..engine.logical_rows import logical_rows

__all__ = ["by_logical_rows"]

_LOGICAL, _OWN = "_dsv41_logical_rows", "_dsv41_own_rows"
_NOT_ROWS = ("fn", "hc_fn", "weight")  # arguments whose first dimension is not rows


def by_logical_rows(
    original: FunctionType, own_rows: Callable[[Any], Any] | None = None
) -> tuple[FunctionType, tuple[str, ...]]:
    """(`original` rewritten, the comparisons that it makes by logical rows as source text).

    own_rows: what `input_ids` passes through where it is compared with an image token's id, beside rows of the chunk.
    Raises ValueError when nothing is compared, or `original` wraps another function (its source would not be it).
    """
    if hasattr(original, "__wrapped__"):
        raise ValueError(f"{original.__qualname__} was wrapped by another adapter before it could be rewritten")
    tree = ast.parse(textwrap.dedent(inspect.getsource(original)))
    function = tree.body[0]
    assert isinstance(function, ast.FunctionDef)
    if function.decorator_list or original.__closure__:
        raise ValueError(f"{original.__qualname__} has decorators or a closure, which a rewritten copy would lose")
    rewriter = _Rewriter(_row_names(function))
    rewriter.visit(function)
    if not rewriter.found:
        raise ValueError(f"{original.__qualname__} compares no row count")
    ast.fix_missing_locations(tree)
    flags = original.__code__.co_flags & __future__.annotations.compiler_flag
    code = compile(tree, original.__code__.co_filename, "exec", flags=flags, dont_inherit=True)
    original.__globals__[_LOGICAL] = logical_rows
    if own_rows is not None:
        original.__globals__[_OWN] = own_rows
    made: dict[str, Any] = {}
    exec(code, original.__globals__, made)
    new = made[function.name]
    new.__defaults__, new.__kwdefaults__ = original.__defaults__, original.__kwdefaults__
    new.__qualname__ = original.__qualname__
    return new, tuple(rewriter.found)


def _row_names(function: ast.FunctionDef) -> set[str]:
    """Names that hold a row count: `m = x.shape[0]`, `m, k = x.shape`, and an argument that is called m."""
    names = {arg.arg for arg in function.args.args if arg.arg == "m"}
    for node in ast.walk(function):
        if not isinstance(node, ast.Assign) or len(node.targets) != 1:
            continue
        target, value = node.targets[0], node.value
        if isinstance(target, ast.Name) and _is_height(value):
            names.add(target.id)
        elif isinstance(target, ast.Tuple) and isinstance(value, ast.Attribute) and value.attr == "shape":
            first = target.elts[0]
            if isinstance(first, ast.Name) and _is_rows(value.value):
                names.add(first.id)
    return names


def _is_rows(node: ast.expr) -> bool:
    return not (isinstance(node, ast.Name) and node.id in _NOT_ROWS)


def _is_height(node: ast.expr) -> bool:
    """`<rows>.shape[0]`"""
    return (
        isinstance(node, ast.Subscript)
        and isinstance(node.value, ast.Attribute)
        and node.value.attr == "shape"
        and isinstance(node.slice, ast.Constant)
        and node.slice.value == 0
        and _is_rows(node.value.value)
    )


def _is_number(node: ast.expr) -> bool:
    """A number, or a name in capitals: a constant of the module."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, int)
    return isinstance(node, ast.Name) and node.id.isupper()


class _Rewriter(ast.NodeTransformer):
    def __init__(self, names: set[str]) -> None:
        self._names = names
        self.found: list[str] = []

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        sides = [node.left, *node.comparators]
        heights = [
            side for side in sides if _is_height(side) or (isinstance(side, ast.Name) and side.id in self._names)
        ]
        if heights and all(side in heights or _is_number(side) for side in sides) and len(heights) < len(sides):
            self.found.append(ast.unparse(node))
            sides = [_call(_LOGICAL, side) if side in heights else side for side in sides]
        elif (
            len(sides) == 2
            and isinstance(sides[0], ast.Name)
            and sides[0].id == "input_ids"
            and isinstance(sides[1], ast.Attribute)
            and sides[1].attr == "image_token_id"
        ):
            self.found.append(ast.unparse(node))
            sides[0] = _call(_OWN, sides[0])
        else:
            return self.generic_visit(node)
        return ast.copy_location(ast.Compare(sides[0], node.ops, sides[1:]), node)


def _call(name: str, argument: ast.expr) -> ast.expr:
    return ast.copy_location(ast.Call(ast.Name(name, ast.Load()), [argument], []), argument)
