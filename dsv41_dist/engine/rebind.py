"""Copies of a function that `from x import f` left behind, found by identity and replaced. Torch-free.

Looked at: globals of every imported module, attributes of the classes they define, and what lists, sets and
dictionaries among those hold directly. A copy in a tuple, a frozenset, a property or a functools.partial cannot be
replaced in place and is reported as stuck. Copies in closures, default arguments and instances cannot be seen.
"""

from __future__ import annotations

import functools
import sys
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

__all__ = ["Rebound", "rebind"]

_OWN = __name__.partition(".")[0]
_DICTS = (dict, OrderedDict, defaultdict)
_SEQUENCES = {list, set, frozenset}
_WRAPPERS = {functools.partial, property, staticmethod, classmethod}
_Lookup = Callable[[Any], Any]  # the replacement of a stale object, or None


class Rebound(NamedTuple):
    """How many copies were replaced, and where copies sit that could not be."""

    replaced: int
    stuck: tuple[str, ...]


def rebind(pairs: Iterable[tuple[Any, Any]]) -> Rebound:
    """Replace every visible copy of each `old` by its `new`. Modules of this package are left alone: they keep the
    originals on purpose."""
    table = {id(old): (old, new) for old, new in pairs}
    ids = frozenset(table)

    def interesting(value: Any, kind: type) -> bool:
        # Millions of values pass here and almost none is a copy: containers are asked at C speed.
        if id(value) in ids or kind in _WRAPPERS:
            return True
        if kind in _DICTS:
            return not (ids.isdisjoint(map(id, value.values())) and ids.isdisjoint(map(id, value)))
        return (kind in _SEQUENCES or issubclass(kind, tuple)) and not ids.isdisjoint(map(id, value))

    def lookup(value: Any) -> Any:
        found = table.get(id(value))
        return found[1] if found is not None else None

    count, stuck = 0, list[str]()
    modules: list[tuple[str, Any]] = list(sys.modules.items())  # some put other objects in there
    for name, module in modules:
        if not issubclass(type(module), types.ModuleType) or name.partition(".")[0] == _OWN:
            continue
        for attribute, value in list(vars(module).items()):
            # The kind is asked of type(), never of the object: lazy objects run code on __class__.
            kind = type(value)
            if interesting(value, kind):
                count += _one(module, attribute, value, f"{name}.{attribute}", lookup, stuck)
            elif issubclass(kind, type) and vars(value).get("__module__") == name:
                for inner, raw in list(vars(value).items()):
                    if interesting(raw, type(raw)):
                        count += _one(value, inner, raw, f"{name}.{attribute}.{inner}", lookup, stuck)
    return Rebound(count, tuple(stuck))


def _one(owner: Any, attribute: str, value: Any, where: str, lookup: _Lookup, stuck: list[str]) -> int:
    kind = type(value)
    new = lookup(value)
    if new is None and kind in (staticmethod, classmethod):
        inner = lookup(value.__func__)
        new = None if inner is None else kind(inner)
    if new is not None:
        try:
            setattr(owner, attribute, new)
        except (AttributeError, TypeError):
            stuck.append(where)
            return 0
        return 1
    if kind is functools.partial:
        parts = [value.func]
    elif kind is property:
        parts = [value.fget, value.fset, value.fdel]
    elif kind in _DICTS:
        return _dict(value, lookup)
    elif kind is list:
        return _list(value, lookup)
    elif kind is set:
        return _set(value, lookup)
    else:
        parts = value if issubclass(kind, (tuple, frozenset)) else []
    if any(lookup(part) is not None for part in parts):
        stuck.append(f"{where} ({kind.__name__})")
    return 0


def _list(values: list[Any], lookup: _Lookup) -> int:
    hits = [(index, new) for index, item in enumerate(values) if (new := lookup(item)) is not None]
    for index, new in hits:
        values[index] = new
    return len(hits)


def _set(values: set[Any], lookup: _Lookup) -> int:
    hits = [(item, new) for item in values if (new := lookup(item)) is not None]
    for item, new in hits:
        values.discard(item)
        values.add(new)
    return len(hits)


def _dict(values: dict[Any, Any], lookup: _Lookup) -> int:
    items = list(values.items())
    hits = [(key, new) for key, item in items if (new := lookup(item)) is not None]
    for key, new in hits:
        values[key] = new
    keys = [key for key, _ in items if lookup(key) is not None]
    if keys:  # rebuilt, so that the order of a dispatch table stays
        items = [(lookup(key) or key, values[key]) for key, _ in items]
        values.clear()
        values.update(items)
    return len(hits) + len(keys)
