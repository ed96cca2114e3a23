"""replicated_split on the real ReplicatedLinear of three releases; replicated_split_probe.py runs in the engine's
Python and forks the ranks."""

from __future__ import annotations

import json

import pytest

from tests.engine.real import RELEASES, scenes

pytestmark = pytest.mark.timeout(300)
ATTN = "model.layers.{}.self_attn.wqkv_a"


SCENES = {
    "0.5.21": ["plain:4", "fp8:4"],
    "0.5.22": ["plain:4", "fp8:4"],
    "0.5.23": [
        *("plain:4", "plain:3", "plain:2", "fp8:4", "published_shape:4", "one_rank_is_off:4"),
        *("one_rank_fails:2", "capture:2", "reloaded:2", "declines:2"),
    ],
}


@pytest.fixture(scope="module")
def probe(engine_python, published):
    asked = {"DSV41_REPLICATED_SPLIT": "wqkv_a", "DSV41_COMM_TIMEOUT_S": "60"}
    return scenes(engine_python, published, "replicated_split_probe.py", SCENES, **asked)


def drives(ranks: list[dict]) -> list[dict]:
    """The results, having asserted that every rank gives the same ones."""
    assert len({json.dumps(one["results"]) for one in ranks}) == 1
    return ranks[0]["results"]


@pytest.mark.parametrize("release", RELEASES)
def test_bytes_are_those_of_the_stock_layer_on_four_ranks(probe, release):
    results = drives(probe(release, "plain:4"))
    assert len(results) == 4 * 10
    split = [*(ATTN.format(i) for i in range(5)), "model.layers.7.engram.wkv"]
    for one in results:
        # 21 rows are above MAX_M; 1, 6 and 17 are decided at the first call and split at the second.
        assert one["equal"] == [True] * 4, one
        assert one["bias"] == [True] * 4, one
        assert one["fired"] == ([1, 1, 1, 0] if one["name"] in split else [0] * 4), one
        even = one["name"] == ATTN.format(3)
        compact = one["DSV41_SPLIT_COMPACT_GATHER"] == "1" and not even
        assert one["variants"] == ((["compact"] if compact else ["padded"]) if one["name"] in split else None), one


@pytest.mark.parametrize("release", RELEASES)
def test_quantized_layers_run_their_own_linear_on_cut_scales(probe, release):
    """The real Fp8LinearMethod dispatches; the GEMM behind it is a stand-in (split_fp8.py) that reads real layouts, or
    the engine's own block kernel in Triton's interpreter."""
    *results, real, moved = drives(probe(release, "fp8:4"))
    assert [(one["name"], one["input"]) for one in results[:6]] == [
        ("block 32", "plain"),
        ("block 32", "pair_input"),
        ("block 128", "plain"),
        ("mxfp8", "plain"),
        ("mxfp8", "pair_input"),
        ("mxfp8", "swizzled_input"),
    ]
    kinds = {"block 32": "fp8 in 32 x 32 blocks", "block 128": "fp8 in 128 x 128 blocks"}
    for one in results:
        assert (one["equal"], one["fired"], one["variants"]) == ([True] * 3, [1] * 3, ["compact"]), one
        assert one["kind"] == kinds.get(one["name"], "MXFP8, scales in 128x4")
    assert (real["equal"], real["fired"], real["variants"]) == ([True] * 2, [1] * 2, ["compact"])
    # One rank's scales a byte further on: stock for all.
    assert (moved["equal"], moved["fired"], moved["variants"]) == ([True], [0], ["stock"])


@pytest.mark.parametrize("world", [2, 3])
def test_bytes_are_those_of_the_stock_layer_on_fewer_ranks(probe, world):
    results = drives(probe("0.5.23", f"plain:{world}"))
    for one in results:
        assert one["equal"] == [True] * 4, one
    # Two tiles split over two ranks, not over three.
    assert {tuple(one["fired"]) for one in results if one["name"] == ATTN.format(5)} == {
        (1, 1, 1, 0) if world == 2 else (0, 0, 0, 0)
    }


def test_what_cannot_be_split_is_declined_by_all_with_the_reason(probe):
    for one in probe("0.5.23", "plain:4"):
        said = "\n".join(one["notes"])
        assert "*.none_such: stock, no layer of the model has this name" in said
        assert f"{ATTN.format(5)}: stock" in said
        assert "2 tiles are fewer than 4 ranks" in said
        assert "1800 is not a multiple of the tile 128" in said
        assert "may run its indexer on a side stream" in said
        assert "6 layers over 4 ranks (bfloat16, float16, float32): a step streams 1.77 MB" in said
    told, other = probe("0.5.23", "declines:2")
    assert told == other
    assert not any(attached for _, attached in told.values())
    assert "LoRA" in told["lora"][0][0]
    assert "startup weight load" in told["late load"][0][0]
    assert told["draft"][0] == []
    assert "attn_dp_size is 2" in told["attention DP"][0][0]
    assert told["one rank"][0] == [f"{ATTN.format(0)}: stock, rank 1: it holds extra, whose layout is not known"]


def test_the_published_shape_at_every_row_count(probe):
    (one,) = drives(probe("0.5.23", "published_shape:4"))
    assert one["rows"] == [1, 6, 16, 48, 96, 97]
    assert one["equal"] == [True] * 6
    assert one["fired"] == [1, 1, 1, 1, 1, 0]
    assert one["variants"] == ["compact"]


def test_one_bit_on_one_rank_turns_the_split_off_on_all_and_the_rank_is_named(probe):
    ranks = probe("0.5.23", "one_rank_is_off:4")
    for one in ranks:
        assert one["result"]["variants"] == ["stock"]
        assert one["result"]["equal"] == [True, True]
        assert one["result"]["fired"] == [0, 0]
        assert one["notes"][1:] == [
            f"{ATTN.format(0)} at ('bfloat16', 6): stock, rank 2: input 0: 1 of 4608 bytes differ"
        ]


def test_a_rank_without_its_slice_leaves_no_other_in_the_gather(probe):
    for one in probe("0.5.23", "one_rank_fails:2"):
        for at, index in (("1", 0), ("3", 2), ("5", 0)):
            assert (one[at]["variants"], one[at]["equal"], one[at]["fired"]) == (["stock"], [True], [0]), at
            why = f"rank 1: input {index}: the fast path raised MemoryError: no room for the slice"
            assert one[at]["note"] == f"{ATTN.format(0)} at ('bfloat16', 6): stock, {why}"


def test_a_capture_uses_what_is_decided_and_votes_on_nothing(probe):
    for one in probe("0.5.23", "capture:2"):
        assert one == {"seen": {"3": [1, True], "4": [0, True]}, "votes": 0}


def test_a_weight_that_is_replaced_is_cut_and_decided_again(probe):
    for one in probe("0.5.23", "reloaded:2"):
        assert [one[key]["equal"] for key in ("before", "in place", "replaced")] == [[True]] * 3
        assert [one[key]["fired"] for key in ("before", "in place", "replaced")] == [[1]] * 3
        assert (one["generation in place"], one["generation replaced"]) == (0, 1)
