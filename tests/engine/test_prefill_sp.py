"""prefill_sp on the real layer loop and layers of three releases; prefill_sp_probe.py runs in the engine's Python and
forks the ranks."""

from __future__ import annotations

import json

import pytest

from tests.engine.real import RELEASES, scenes

pytestmark = pytest.mark.timeout(300)

EVERYWHERE = ["exact:4", "other_modes:4", "debug:4", "never_enters:4", "choices:4"]
SCENES = {
    "0.5.21": EVERYWHERE,
    "0.5.22": EVERYWHERE,
    "0.5.23": [*EVERYWHERE, "one_rank_is_off:4", "few:2", "declines:4"],
}
# 0.5.23 has a layer for CUDA and one for other platforms; before, there was one.
LAYERS = {"0.5.21": ["platform"], "0.5.22": ["platform"], "0.5.23": ["cuda", "platform"]}
PREFILL = {
    "DSV41_PREFILL_SP": "1",
    "DSV41_PREFILL_SP_EXACT": "1",
    "DSV41_COMM_TIMEOUT_S": "120",
    "SGLANG_OPT_USE_TILELANG_MHC_POST": "0",
    "SGLANG_OPT_USE_TILELANG_MHC_PRE": "0",
}


@pytest.fixture(scope="module")
def probe(engine_python, published):
    return scenes(engine_python, published, "prefill_sp_probe.py", SCENES, **PREFILL)


def agreed(ranks: list):
    """What rank 0 saw, having asserted that every rank saw the same."""
    assert len({json.dumps(one) for one in ranks}) == 1
    return ranks[0]


@pytest.mark.parametrize("release", RELEASES)
def test_exact_mode_gives_the_bytes_of_stock_on_four_ranks(probe, release):
    results = agreed(probe(release, "exact:4"))
    assert len(results) == 11 * len(LAYERS[release])
    for one in results:
        _, rows, tail, *_ = one["case"]
        # Residual, pre, captured rows and what the tail's source layer writes; before and after wkv is decided.
        assert one["equal"] == [True, True], one
        assert one["outputs"] >= 2
        assert (one["fired"], one["sharded"], one["stock"]) == (2, 2, {}), one
        assert one["verdicts"] == {f"(1, {rows})": True}, one
        # Attention and experts see the whole chunk, and after it the tail's rows, as in stock.
        assert one["heights"][0] == one["heights"][1], one
        assert max(one["heights"][1]) == rows
        assert (min(one["heights"][1]) < rows) == (tail is not None), one


def test_more_than_twenty_configurations_of_the_newest_release(probe):
    cases = [json.dumps(one["case"]) for one in agreed(probe("0.5.23", "exact:4"))]
    assert len(set(cases)) == len(cases) == 22


def test_exact_mode_on_two_ranks(probe):
    for one in agreed(probe("0.5.23", "few:2")):
        assert (one["equal"], one["fired"]) == ([True, True], 2), one


@pytest.mark.parametrize("release", RELEASES)
def test_the_reduce_scatter_form_differs_only_in_how_sums_are_rounded(probe, release):
    for one in agreed(probe(release, "other_modes:4")):
        assert (one["fired"], one["stock"]) == (2, {}), one
        assert f"2 chunks sharded ({one['mode']}), 0 stock" == one["note"]
        (said,) = one["more"]
        # Row-local ops are stock's to the bit; only what is summed may differ, and that by little.
        assert ", 0 differing bytes on every rank; " in said, one
        assert " sums beside the all-reduce, " in said
        replicated = "replicated" in one["case"]
        assert one["largest"] <= (0.25 if replicated else 0.0), one
        if one["mode"] == "comm" or one.get("wkv") is False:
            assert one["verdicts"] == {}
        assert said.startswith("compare: 0 ops") == (one["mode"] == "comm")


@pytest.mark.parametrize("release", RELEASES)
def test_compare_finds_no_byte_in_whole_chunks_and_one_bit_on_one_rank(probe, release):
    ranks = probe(release, "debug:4")
    equal = agreed([one["equal"] for one in ranks])
    for index, one in enumerate(equal):
        # 4 layers of 6 ops and an Engram; half of that with a tail from layer 2 (0.5.23 writes its source first).
        count = 50 if index % 2 == 0 else 28 if release == "0.5.23" else 26
        assert one["more"] == [f"compare: {count} ops in 2 chunks, 0 differing bytes on every rank"], one
        assert one["equal"] == [True, True]
    name = "hc_combine" if release == "0.5.21" else "combine"
    off = agreed([one["off"] for one in ranks])
    assert (
        f"compare: 25 ops in 1 chunks, rank 1: layer 0 attn {name}: 1 of 8192 bytes differ; rank 1: " in off["more"][0]
    )
    assert "rank 0" not in off["more"][0]
    # DEBUG_CHUNKS=1: the second chunk is not looked at.
    assert off["equal"] == [False, True]
    dumps = [one["dumps"] for one in ranks]
    assert dumps[0] == dumps[2] == dumps[3] == {}
    assert len(dumps[1]) == 8
    assert set(map(tuple, dumps[1].values())) == {("sharded", "stock")}
    assert f"chunk0_layer_0_attn_{name}_1_rank1.pt" in dumps[1]


@pytest.mark.parametrize("release", RELEASES)
def test_decode_verify_drafts_captures_and_odd_chunks_never_enter(probe, release):
    seen = agreed(probe(release, "never_enters:4"))
    few, odd = {"fewer than 64 rows": 1}, {"rows not a multiple of 4": 1}
    late = ("254 rows", "60 rows", "a prefill after all", "and a draft's layer")
    for name, result in seen.items():
        if name not in late:
            assert result == [True, 0, 0, {}], name
    assert {"DECODE", "TARGET_VERIFY", "DRAFT_EXTEND_V2", "IDLE", "captured", "tuning run"} <= set(seen)
    assert seen["254 rows"] == [True, 0, 0, odd]
    assert seen["60 rows"] == [True, 0, 0, {**odd, **few}]
    # The same model does shard when a chunk qualifies, and a draft's layer after it does not.
    assert seen["a prefill after all"] == [True, 1, 1, {**odd, **few}]
    assert seen["and a draft's layer"] == [True, 1, 1, {**odd, **few}]


@pytest.mark.parametrize("release", RELEASES)
def test_kernels_are_chosen_for_the_whole_chunk(probe, release):
    seen = agreed(probe(release, "choices:4"))
    assert seen["tiles"] == [True] * 6
    made = {name: len(found) for name, found in seen["rewritten"].items()}
    by_module = {"_mix_stats_impl": 5, "_combine": 3, "post": 3, "_post_fusion": 2, "hc_combine_norm": 3}
    launchers = {"_block_m_for": 2, "mhc_post_split_h": 1, "hc_mix_stats_sinkhorn_bf16x3": 2}
    by_method = {"_hc_combine": 6, "_hc_mix_stats": 3, "_hc_post_with_combine": 3, "hc_post": 3}
    old = {"hc_combine_norm": 5, "_num_stages_for": 1, "mhc_post_combine": 2, "hc_norm_prefill": 1}
    assert (
        made
        == {
            "0.5.21": {**launchers, **by_method, **old, "hc_mix_stats_sinkhorn_bf16x3": 1},
            "0.5.22": {**launchers, **by_module},
            "0.5.23": {**launchers, **by_module, "mhc_post": 1},
        }[release]
    )


def test_one_bit_of_one_ranks_projection_keeps_it_whole_on_all_and_the_rank_is_named(probe):
    seen = agreed(probe("0.5.23", "one_rank_is_off:4"))
    assert seen["equal"] == [True] * 4
    assert seen["verdicts"] == {"(1, 256)": False, "(1, 252)": True}
    # Deciding runs both forms; then 256 rows stay whole, and 252 are sharded.
    assert seen["heights"] == [256, 64, 256, 252, 63, 63]
    assert seen["notes"] == [
        "layer 1 engram.wkv at 256 rows: whole on every rank, rank 2: input 0: 1 of 40960 bytes differ"
    ]


def test_what_cannot_be_sharded_is_declined_with_the_reason(probe):
    seen = agreed(probe("0.5.23", "declines:4"))
    assert seen["attached"] == [["0 chunks sharded (exact), 0 stock"], True]
    assert seen["draft"] == [[], False]
    for name, why in {
        "lora": "LoRA reads the rows of linear layers",
        "another model": "the model has no DeepSeek-V4.1 layer loop",
        "V4": "the model's hyper-connections are not those of V4.1",
        "stages": "pipeline parallel stages hand whole rows over",
    }.items():
        assert seen[name] == [[f"no chunk is sharded: {why}"], False]
