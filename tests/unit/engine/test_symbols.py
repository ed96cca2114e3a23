"""Fingerprints: blind to comments, docstrings and layout, and to nothing else; equal under every Python."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv41_dist.engine.symbols import find
from tests.unit.engine.toy import ROOT

BASE = '''
import functools


@functools.cache
def plain(a, b=1, /, c=2, *args, d, e=3, **kw):
    """Doc."""
    if a:
        x = {"k": [a, b], 'text': """two
    lines"""}
        return f"{a!r:>{b}} of {x['k']}" + rf"\\d{c}"
    return (a,), foo(a, b), x[1:2, ...]


class Thing:
    """Doc."""

    limit: int = 3

    @property
    def size(self):
        return 1

    @size.setter
    def size(self, value):
        self._size = value

    async def run(self, *, steps):
        def inner(y):
            return y + steps
        return inner


if True:
    def twice():
        return 1
else:
    def twice():
        return 2
'''
NAMES = ["plain", "Thing", "Thing.size", "Thing.run", "Thing.run.<locals>.inner", "twice"]
# Computed once under Python 3.11; every other version must agree.
GOLDEN = {
    "plain": "a0ac84584d63aedd",
    "Thing": "726b6375ac3c9cb0",
    "Thing.size": "c5f73a829ae133ac",
    "Thing.run": "48e1c49f6ccc8eba",
    "Thing.run.<locals>.inner": "04d675a737dc0d39",
    "twice": "d9b5924b0305add7",
}

SAME = [
    ("    if a:", "    # why\n\n    if a:  # so"),
    ('    """Doc."""\n    if', '    """Another\n    text."""\n    if'),
    ('    """Doc."""\n    if', "    if"),
    ("foo(a, b)", "foo(\n        a,\n        b,\n    )"),
    ("foo(a, b)", "foo(a,b)"),
    ("foo(a, b)", "foo(a,\\\n b)"),
    ("[a, b]", "[\n            a,  # first\n            b\n        ]"),
    ("c=2, *args", "c = 2,\n    *args"),
    ("@functools.cache", "@functools.cache  # memo"),
    ('    """Doc."""\n\n    limit', "    limit"),
]
DIFFERENT = [
    ("foo(a, b)", "foo(b, a)"),
    ("(a,), foo", "(a), foo"),
    ("b=1", "b=2"),
    ("@functools.cache", "@functools.lru_cache"),
    ("two\n    lines", "two\n     lines"),
    ("!r:>", "!s:>"),
    ("{b}} of", "{c}} of"),
    ("x[1:2, ...]", "x[1:2]"),
    ("        x = {", "        y = {"),
    ("    return (a,)", "        return (a,)"),
]


def plain(source: str) -> str:
    return find(source, ["plain"])["plain"].fingerprint


@pytest.mark.parametrize(("old", "new"), SAME)
def test_comments_docstrings_and_layout_change_nothing(old, new):
    assert BASE.count(old) == 1
    before, after = find(BASE, NAMES), find(BASE.replace(old, new), NAMES)
    assert {name: s.fingerprint for name, s in before.items()} == {name: s.fingerprint for name, s in after.items()}


@pytest.mark.parametrize(("old", "new"), DIFFERENT)
def test_every_other_change_shows(old, new):
    assert BASE.count(old) == 1
    assert plain(BASE.replace(old, new)) != plain(BASE)


def test_golden_fingerprints():
    assert {name: symbol.fingerprint for name, symbol in find(BASE, NAMES).items()} == GOLDEN


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13", "3.14"])
def test_other_python_versions_on_this_machine_agree(version):
    python = shutil.which(f"python{version}")
    env = {**os.environ, "PYENV_VERSION": version}
    if python is None or subprocess.run([python, "-c", ""], env=env, capture_output=True).returncode:
        pytest.skip(f"python{version} is not on this machine; the golden fingerprints are what every CI version checks")
    code = "import sys; from dsv41_dist.engine.symbols import find; s, *n = sys.argv[1:]; f = find(s, n); "
    code += "print(*(f[x].fingerprint for x in n))"
    out = subprocess.run([python, "-c", code, BASE, *NAMES], cwd=ROOT, env=env, capture_output=True, text=True)
    assert out.stdout.split() == list(GOLDEN.values()), out.stderr


def test_names_lines_and_signatures():
    found = find(BASE, [*NAMES, "missing"])
    assert sorted(found) == sorted(NAMES)
    assert found["plain"].signature == "(a, b=, /, c=, *args, d, e=, **kw)"
    assert found["Thing.run"].signature == "(self, *, steps)"
    assert found["Thing"].kind == "class"
    rows = BASE.split("\n")
    assert rows[found["plain"].line - 1].startswith("def plain")
    assert rows[found["Thing.run.<locals>.inner"].line - 1].strip().startswith("def inner")


def test_a_name_defined_twice_is_one_symbol():
    assert find(BASE.replace("return 2", "return 3"), ["twice"])["twice"].fingerprint != GOLDEN["twice"]
    changed = BASE.replace("self._size = value", "self._size = value + 1")
    assert find(changed, ["Thing.size"])["Thing.size"].fingerprint != GOLDEN["Thing.size"]


def test_logical_lines_point_into_the_file():
    rows = BASE.split("\n")
    for name, symbol in find(BASE, NAMES).items():
        for line in symbol.lines:
            assert rows[line.line - 1] == line.text.split("\n")[0], name


def test_indentation_of_the_whole_definition_does_not_matter():
    source = "def f(a):\n    s = '''x\n y'''\n    return s\n"
    nested = "if 1:\n  if 2:\n    def f(a):\n        s = '''x\n y'''\n        return s\n"
    assert find(source, ["f"])["f"].fingerprint == find(nested, ["f"])["f"].fingerprint


@given(st.lists(st.tuples(st.integers(1, 10), st.sampled_from(["", "# note", "    # note"])), max_size=8))
def test_comments_and_blank_lines_anywhere(inserts):
    rows = textwrap.dedent(
        """
        def f(a, b):
            total = 0
            for i in range(a):
                total += i
                if total > b:
                    break
            else:
                total = -1
            return total
        """
    ).split("\n")[1:]
    plain_print = find("\n".join(rows), ["f"])["f"].fingerprint
    for at, text in inserts:
        rows.insert(min(at, len(rows)), text)
    assert find("\n".join(rows), ["f"])["f"].fingerprint == plain_print


def test_importing_symbols_and_drift_imports_no_torch():
    code = "import sys, dsv41_dist.engine.drift, dsv41_dist.engine.hook; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=30).returncode == 0
