"""Copies of a function that `from x import f` left behind, found by identity and replaced. Torch-free.

Looked at: globals of every imported module, attributes of the classes they define (nested ones too), and what
containers among those hold directly. In lists, sets and dictionaries copies are replaced. A copy in a tuple, a
frozenset, a deque, a mapping proxy, a subclass of list, set or dict, a property or a functools.partial is reported as
stuck. Copies in closures, default arguments, instances and containers inside containers cannot be seen.
"""

from __future__ import annotations

import functools
import gc
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

__all__ = ["Rebound", "rebind"]

_OWN = __name__.partition(".")[0]
_Parts = tuple[Callable[[Any], Iterable[Any]], ...]


def _behind(proxy: Any) -> Iterable[Any]:
    (mapping,) = gc.get_referents(proxy)
    return dict.values(mapping) if issubclass(type(mapping), dict) else ()


# What a value of a kind holds. The base class's own methods are used: those of lazy containers load what they name.
_EXACT: dict[type, _Parts] = {
    functools.partial: (lambda value: (value.func,),),
    property: (lambda value: (value.fget, value.fset, value.fdel),),
    staticmethod: (lambda value: (value.__func__,),),
    classmethod: (lambda value: (value.__func__,),),
    types.MappingProxyType: (_behind,),
}
_BASES: dict[type, _Parts] = {
    dict: (dict.values, dict.keys),
    **{kind: (kind.__iter__,) for kind in (list, tuple, set, frozenset, deque)},
}


class Rebound(NamedTuple):
    """How many copies were replaced, for each pair, and where copies sit that could not be."""

    replaced: tuple[int, ...]
    stuck: tuple[str, ...]


class _Pair:
    def __init__(self, old: Any, new: Any) -> None:
        self.old, self.new, self.copies = old, new, 0

    def place(self) -> Any:
        self.copies += 1
        return self.new


_Lookup = Callable[[Any], "_Pair | None"]  # the pair of a stale object


def rebind(pairs: Iterable[tuple[Any, Any]]) -> Rebound:
    """Replace every visible copy of each `old` by its `new`. Modules of this package are left alone: they keep the
    originals on purpose."""
    each = [_Pair(old, new) for old, new in pairs]
    table = {id(pair.old): pair for pair in each}
    ids = frozenset(table)
    known: dict[type, _Parts] = {}
    seen: set[int] = set()
    stuck = list[str]()

    def lookup(value: Any) -> _Pair | None:
        return table.get(id(value))

    modules: list[tuple[str, Any]] = list(sys.modules.items())  # some put other objects in there
    for name, module in modules:
        if not issubclass(type(module), types.ModuleType) or name.partition(".")[0] == _OWN:
            continue
        owners: list[tuple[str, Any]] = [(name, module)]
        for where, owner in owners:  # grows: classes of the module come after it
            for attribute, value in list(vars(owner).items()):
                # The kind is asked of type(), never of the object: lazy objects run code on __class__.
                kind = type(value)
                parts = known.get(kind)
                if parts is None:
                    parts = known[kind] = _parts(kind)
                # Millions of values pass here and almost none is a copy: containers are asked at C speed.
                hit = id(value) in ids
                for part in parts:
                    hit = hit or not ids.isdisjoint(map(id, part(value)))
                if hit:
                    _one(owner, attribute, value, f"{where}.{attribute}", lookup, stuck)
                elif issubclass(kind, type) and id(value) not in seen and vars(value).get("__module__") == name:
                    seen.add(id(value))
                    owners.append((f"{where}.{attribute}", value))
    return Rebound(tuple(pair.copies for pair in each), tuple(stuck))


def _parts(kind: type) -> _Parts:
    bases = (parts for base, parts in _BASES.items() if issubclass(kind, base))
    return _EXACT.get(kind) or next(bases, ())


def _one(owner: Any, attribute: str, value: Any, where: str, lookup: _Lookup, stuck: list[str]) -> None:
    """`value` is a copy or holds one."""
    kind = type(value)
    pair = lookup(value)
    method = pair is None and kind in (staticmethod, classmethod)
    if method:
        pair = lookup(value.__func__)
    if pair is not None:
        try:
            setattr(owner, attribute, kind(pair.new) if method else pair.new)
        except (AttributeError, TypeError):
            stuck.append(where)
        else:
            pair.copies += 1
    elif kind in (dict, OrderedDict, defaultdict):
        _dict(value, lookup)
    elif kind is list:
        value[:] = [item if (pair := lookup(item)) is None else pair.place() for item in value]
    elif kind is set:
        for pair in [pair for item in value if (pair := lookup(item)) is not None]:
            value.discard(pair.old)
            value.add(pair.place())
    else:
        stuck.append(f"{where} ({kind.__name__})")


def _dict(values: dict[Any, Any], lookup: _Lookup) -> None:
    for key, item in list(values.items()):
        if (pair := lookup(item)) is not None:
            values[key] = pair.place()
    if any(lookup(key) is not None for key in values):  # rebuilt, so that the order of a dispatch table stays
        items = [(key if (pair := lookup(key)) is None else pair.place(), item) for key, item in values.items()]
        values.clear()
        values.update(items)
