"""draft_main_proj on the real draft class of three releases; draft_main_proj_probe.py runs in the engine's Python and
forks the ranks. Quantized GEMMs are the stand-ins of split_fp8.py."""

from __future__ import annotations

import json

import pytest

from tests.engine.real import HERE, RELEASES, engine_env, run_engine

pytestmark = pytest.mark.timeout(300)
NO_TWIN = "main_proj's weight is not e4m3 times a power of two for each 32 columns of a row"


def run(engine_python, tree, *scenes: str, **extra: str):
    env = engine_env(tree, DSV41_DRAFT_MAIN_PROJ_SPLIT="1", DSV41_COMM_TIMEOUT_S="60", **extra)
    return run_engine(engine_python, [str(HERE / "draft_main_proj_probe.py"), *scenes], env, timeout=280)


@pytest.fixture(scope="module", params=RELEASES)
def seen(request, engine_python, published):
    """(release, what each rank saw, by scene)."""
    result = run(engine_python, published(request.param), "served:4", "declined:4")
    assert result.returncode == 0, result.stderr[-4000:]
    return request.param, json.loads(result.stdout.splitlines()[-1])


def test_the_weight_is_read_out_of_every_layout_exactly(seen):
    _, out = seen
    for rank in out["served:4"]:
        assert {name: (one["read"], one["twin"]) for name, one in rank.items()} == {
            "block fp8": (True, True),
            "mxfp8": (True, True),
            "bf16": (True, True),
        }


def test_up_to_16_rows_are_served_with_the_same_bits_on_every_rank(seen):
    _, out = seen
    for name in ("block fp8", "mxfp8", "bf16"):
        ranks = [rank[name] for rank in out["served:4"]]
        assert len({json.dumps(one["bits"]) for one in ranks}) == 1
        for one in ranks:
            assert one["fired"] == [1, 1, 1, 0], "17 rows are the stock layer's"
            assert one["alone"] == [True] * 3, "a row's bits depend on how many rows there are"
            assert one["stock"] is True


def test_the_result_is_the_unquantized_one_to_bf16(seen):
    """Errors over the mean magnitude; the quantized stock layer is further from float64 than the split is."""
    _, out = seen
    for name, one in out["served:4"][0].items():
        assert max(one["near"][:3]) < 0.06, (name, one)
        if name != "bf16":
            assert max(one["near"][:3]) < one["stock near"] / 2, (name, one)


def test_the_report_says_what_it_costs_and_saves(seen):
    _, out = seen
    for rank, columns in enumerate((192, 192, 128, 128)):
        one = out["served:4"][rank]["bf16"]
        assert one["memory"] == columns * 256 * 33 // 32
        assert one["notes"][0].startswith("main_proj over 4 ranks: a projection streams 0.")


def test_what_has_no_twin_on_one_rank_is_stock_on_all(seen):
    _, out = seen
    for rank in out["declined:4"]:
        assert rank["no twin"] == [[f"main_proj: stock, {NO_TWIN}"], True]
        assert rank["one rank"] == [[f"main_proj: stock, rank 2: {NO_TWIN}"], True]
        assert rank["bias"] == [["main_proj: stock, main_proj has a bias"], True]
        assert rank["others"] == [[], 0]


@pytest.mark.parametrize("release", RELEASES)
def test_the_deferred_context_commit_is_refused_where_there_is_one(engine_python, published, release):
    result = run(engine_python, published(release), SGLANG_DSPARK_DEFER_CONTEXT_KV="1")
    if release == "0.5.23":
        assert result.returncode == 1
        assert "dsv41_dist refuses to go on: DSV41_DRAFT_MAIN_PROJ_SPLIT" in result.stderr
        assert "SGLANG_DSPARK_DEFER_CONTEXT_KV" in result.stderr
    else:
        assert result.returncode == 0, result.stderr[-2000:]
