"""Stale copies: found by identity, replaced where they can be, named where they cannot."""

from __future__ import annotations

import functools
import sys
import types
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple

import pytest

from dsv41_dist.engine.rebind import rebind


@pytest.fixture
def module():
    made = types.ModuleType("toy_rebind_module")
    sys.modules[made.__name__] = made
    yield made
    del sys.modules[made.__name__]


@pytest.fixture
def pair():
    # Fresh objects: the test module's own globals are modules' globals too.
    def first(x):
        return x

    def second(x):
        return -x

    return first, second


def test_globals_classes_and_containers(module, pair):
    first, second = pair

    class Owner:
        method = first
        static = staticmethod(first)
        klass = classmethod(first)
        table = {"a": first}

    Owner.__module__ = module.__name__
    module.copy, module.Owner = first, Owner
    module.chain = [first, 1, first]
    module.chosen = {first}
    module.table = OrderedDict(a=first, b=2)
    module.keyed = {"x": 0, first: 1, "y": 2}
    module.default = defaultdict(int, a=first)
    result = rebind([pair])
    assert result.stuck == ()
    assert result.replaced == (11,)
    assert module.copy is Owner.method is Owner.static is second
    assert Owner.__dict__["klass"].__func__ is second
    assert Owner.table == {"a": second}
    assert module.chain == [second, 1, second]
    assert module.chosen == {second}
    assert module.table == {"a": second, "b": 2}
    assert list(module.keyed) == ["x", second, "y"]
    assert module.default["a"] is second
    assert rebind([pair]) == ((0,), ())


@pytest.mark.parametrize(
    "hide",
    [
        lambda f: (f, 1),
        lambda f: frozenset([f]),
        lambda f: functools.partial(f, 1),
        lambda f: property(f),
        lambda f: namedtuple("Pair", "a b")(f, 1),
        lambda f: deque([f]),
        lambda f: types.MappingProxyType({"a": f}),
        lambda f: type("Sub", (dict,), {})(a=f),
        lambda f: type("Sub", (OrderedDict,), {})({f: 1}),
        lambda f: type("Sub", (list,), {})([f]),
        lambda f: type("Sub", (set,), {})([f]),
    ],
)
def test_what_cannot_be_replaced_is_named(module, pair, hide):
    module.hidden = hide(pair[0])
    result = rebind([pair])
    assert result.replaced == (0,)
    assert len(result.stuck) == 1
    assert result.stuck[0].startswith("toy_rebind_module.hidden (")


def test_nested_classes(module, pair):
    class Owner:
        class Inner:
            method = pair[0]

            class Innermost:
                static = staticmethod(pair[0])
                hidden = (pair[0],)

    Owner.Inner.up = Owner  # a circle
    for made in (Owner, Owner.Inner, Owner.Inner.Innermost):
        made.__module__ = module.__name__
    module.Owner = module.Again = Owner
    result = rebind([pair])
    assert Owner.Inner.method is Owner.Inner.Innermost.static is pair[1]
    assert result == ((2,), ("toy_rebind_module.Owner.Inner.Innermost.hidden (tuple)",))


def test_copies_are_counted_for_each_function(module, pair):
    def other():
        pass

    module.a, module.b = pair[0], [other, pair[0], other]
    assert rebind([pair, (other, other), (object(), None)]).replaced == (2, 2, 0)


def test_a_class_that_cannot_be_written_is_stuck(module, pair):
    class Locked(type):
        def __setattr__(cls, name, value):
            raise TypeError("locked")

    body = {"method": pair[0], "__module__": module.__name__}
    module.Locked = Locked("Owner", (), body)
    assert rebind([pair]).stuck == ("toy_rebind_module.Locked.method",)


def test_equal_is_not_identical(module, pair):
    class Same:
        def __eq__(self, other):
            raise AssertionError("compared by value")

        __hash__ = object.__hash__

    module.values = [Same(), 1.0, "x"]
    module.keyed = {Same(): Same()}
    assert rebind([pair]) == ((0,), ())


def test_lazy_objects_are_not_touched(module, pair):
    class Lazy:
        @property
        def __class__(self):
            raise AssertionError("asked for __class__")

        def __getattr__(self, name):
            raise AssertionError(name)

    class LazyDict(dict):
        def values(self):
            raise AssertionError("asked for its values")

        __iter__ = keys = items = values

    class LazyMapping(UserDict):
        def __iter__(self):
            raise AssertionError("asked for its keys")

    class LazyList(list):
        def __iter__(self):
            raise AssertionError("asked for its items")

    module.lazy, module.table, module.row = Lazy(), LazyDict(a=1), LazyList([1])
    module.proxy, module.user = types.MappingProxyType(LazyDict(a=1)), types.MappingProxyType(LazyMapping())
    assert rebind([pair]) == ((0,), ())


def test_our_own_modules_keep_the_originals(pair):
    import dsv41_dist.engine.rebind as own

    own.kept = pair[0]
    try:
        assert rebind([pair]) == ((0,), ())
        assert own.kept is pair[0]
    finally:
        del own.kept
