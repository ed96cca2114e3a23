"""What this project calls of b12x, and the stand-in of it, against the published wheels' source (not imported)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from dsv41_dist.comm.errors import TransportUnavailable
from dsv41_dist.comm.transports._roce_runtime import SURFACE, changed
from dsv41_dist.comm.transports._roce_runtime import find as find_library

from . import stand_in
from .wheels import find, source, tree, wheel

MODULES = {
    "RoceOneshotAllReduce": "b12x/comm/roce/roce_oneshot.py",
    "query_from_runtime": "b12x/comm/roce/_preparation.py",
    "plan": "b12x/comm/roce/_preparation.py",
    "load": "b12x/comm/roce/_proxy.py",
    "PreparationSession": "b12x/preparation/session.py",
    "PreparedCall": "b12x/preparation/types.py",
    "Plan": "b12x/preparation/types.py",
}


def parameters(release, name):
    """What inspect.signature would list, from the source; None when it is not there."""
    node = find(tree(release, MODULES[name.split(".")[0]]), name)
    if isinstance(node, ast.ClassDef):
        return tuple(n.target.id for n in node.body if isinstance(n, ast.AnnAssign))
    if node is None:
        return None
    return tuple(arg.arg for arg in [*node.args.args, *node.args.kwonlyargs])


@pytest.mark.parametrize("release", ["1.5.0", "1.5.1"])
def test_the_published_surface_is_the_one_that_is_called(release):
    assert {MODULES[name.split(".")[0]] for _, name, _ in SURFACE} == set(MODULES.values())
    for module, name, _ in SURFACE:
        assert module.replace(".", "/") + ".py" == MODULES[name.split(".")[0]]
    assert changed({name: parameters(release, name) for _, name, _ in SURFACE}) is None


def test_a_release_before_1_5_has_no_comm_roce():
    with wheel("1.3.0") as archive:
        assert not [name for name in archive.namelist() if name.startswith("b12x/comm/roce")]


def test_the_surface_before_plans_is_refused_as_such():
    old = {name: parameters("1.5.1", name) for _, name, _ in SURFACE}
    old["RoceOneshotAllReduce.all_gather"] = ("self", "inp", "dim", "out", "stream")
    old["query_from_runtime"] = None
    assert "takes no plan=" in changed(old)


@pytest.mark.parametrize("name", [name for _, name, wanted in SURFACE if wanted])
def test_a_missing_parameter_is_named_with_what_is_there(name):
    now = {n: parameters("1.5.1", n) for _, n, _ in SURFACE}
    wanted = next(w for _, n, w in SURFACE if n == name)
    gone = wanted[-1]
    now[name] = tuple(one for one in now[name] if one != gone)
    said = changed(now)
    assert said
    assert gone in said or "no plan=" in said
    now[name] = None
    assert f"{name} is not there" in changed(now)


def test_without_b12x_the_refusal_says_what_to_install():
    try:
        import b12x  # noqa: F401
    except ImportError:
        with pytest.raises(TransportUnavailable, match=r"b12x is not installed: pip install 'b12x>=1\.5'"):
            find_library()
    else:
        assert find_library().bound in ("time", "polls")


def signature(node):
    """Names, kinds and defaults, as text."""
    args = node.args
    return ast.unparse(
        ast.arguments(
            posonlyargs=[],
            args=[ast.arg(a.arg) for a in args.args],
            kwonlyargs=[ast.arg(a.arg) for a in args.kwonlyargs],
            kw_defaults=args.kw_defaults,
            defaults=args.defaults,
            vararg=args.vararg,
            kwarg=args.kwarg,
        )
    )


#: Defaults that are the wheel's own constants of other modules.
OWN_DEFAULTS = {"PreparationSession.__init__", "plan"}


@pytest.mark.parametrize("release", ["1.5.0", "1.5.1"])
def test_the_stand_in_has_the_wheels_signatures(release):
    ours = ast.parse(Path(stand_in.__file__).read_text())
    compared = []
    for name, path in MODULES.items():
        theirs = tree(release, path)
        node = find(ours, name)
        names = [name]
        if isinstance(node, ast.ClassDef):
            names = [f"{name}.{n.name}" for n in node.body if isinstance(n, ast.FunctionDef)]
        for one in names:
            mine, real = find(ours, one), find(theirs, one)
            if one in ("RoceOneshotAllReduce._open", "RoceOneshotAllReduce._prepared", "RoceOneshotAllReduce._meet"):
                assert real is None  # the stand-in's own
                continue
            if one in ("Plan.__init__", "PreparedCall.__init__"):
                continue  # dataclasses: SURFACE covers their fields
            assert real is not None, one
            assert bool(mine.decorator_list) == bool(real.decorator_list), one
            if one in OWN_DEFAULTS:
                assert parameters(release, one) == tuple(a.arg for a in [*mine.args.args, *mine.args.kwonlyargs])
            else:
                assert signature(mine) == signature(real), one
            compared.append(one)
    assert len(compared) >= 15


@pytest.mark.parametrize("release", ["1.5.0", "1.5.1"])
def test_constants_and_error_texts_are_the_wheels(release):
    text = source(release, MODULES["RoceOneshotAllReduce"])
    module = tree(release, MODULES["RoceOneshotAllReduce"])
    values = {n.targets[0].id: n.value for n in module.body if isinstance(n, ast.Assign) and len(n.targets) == 1}
    for name in ("DEFAULT_MAX_SIZE", "DEFAULT_MAX_GATHER_BYTES", "DEFAULT_THREADS", "DEFAULT_BLOCKS"):
        assert eval(ast.unparse(values[name])) == getattr(stand_in, name)
    assert ast.unparse(values["SUPPORTED_DTYPES"]) == "(torch.float16, torch.bfloat16, torch.float32)"
    for said in (
        "input is not eligible for the RoCE one-shot all-reduce",
        "input is not eligible for the RoCE all-gather",
        "RoCE all-reduce dtype differs from preparation",
        "RoCE plan belongs to another runtime",
        "RoCE all-reduce setup failed: ",
        "RoCE all-reduce connect failed: ",
        "RoCE proxy failed: ",
        "RoCE runtime is closed",
        "configuration differs from rank 0",
        "timed out waiting for rank ",
    ):
        assert said in text, said
    # What the missing rank is read from, and what close waits for.
    assert "RDMA write to rank %u failed: %s" in source(release, "b12x/comm/roce/_roce_proxy.c")
    stats = ast.unparse(find(module, "RoceOneshotAllReduce.stats"))
    proxy = ast.unparse(find(tree(release, MODULES["load"]), "Proxy.stats"))
    assert all(f"'{key}'" in stats for key in ("ctrl_seq", "hcas"))
    assert all(f"'{key}'" in proxy for key in ("ops_posted", "writes_completed", "last_seq"))
