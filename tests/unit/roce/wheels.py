"""The published b12x wheels, read from the cache; fetched into it with pip when they are not there."""

from __future__ import annotations

import ast
import subprocess
import sys
import zipfile
from functools import lru_cache

import pytest

from dsv41_dist.engine.survey import cache_folder


def wheel(release: str) -> zipfile.ZipFile:
    folder = cache_folder() / "b12x"
    if not list(folder.glob(f"b12x-{release}-*.whl")):
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), f"b12x=={release}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
        if done.returncode:
            pytest.skip(f"the b12x {release} wheel is not in {folder} and pip cannot fetch it: {done.stderr[-300:]}")
    return zipfile.ZipFile(next(folder.glob(f"b12x-{release}-*.whl")))


@lru_cache
def source(release: str, path: str) -> str:
    with wheel(release) as archive:
        return archive.read(path).decode()


@lru_cache
def tree(release: str, path: str) -> ast.Module:
    return ast.parse(source(release, path))


def find(tree: ast.AST, qualname: str) -> ast.AST | None:
    node: ast.AST | None = tree
    for part in qualname.split("."):
        named = (ast.FunctionDef, ast.ClassDef)
        node = next((n for n in ast.iter_child_nodes(node) if isinstance(n, named) and n.name == part), None)
        if node is None:
            return None
    return node
