"""prefill_sp's fp8 gathers on the real layer loop, layers, attention and quantized projections of three releases;
prefill_fp8_probe.py runs in the engine's Python and forks the ranks."""

from __future__ import annotations

import pytest

from tests.engine.real import RELEASES, scenes
from tests.engine.test_prefill_sp import LAYERS, PREFILL, agreed

pytestmark = pytest.mark.timeout(300)

SCENES = {
    "0.5.21": ["exact:4", "few:2"],
    "0.5.22": ["exact:4", "few:2"],
    "0.5.23": ["exact:4", "modes:4", "one_rank_is_off:4", "one_rank_cannot_round:4", "declines:4", "few:2"],
}
HIDDEN, GROUPS = 64, 2
ROUTER, COMPRESSOR, INDEXER = "the router reads the rows", "its compressor reads the rows", "its indexer reads the rows"
FIRST = "first of their size"


@pytest.fixture(scope="module")
def probe(engine_python, published):
    asked = {**PREFILL, "DSV41_PREFILL_SP_FP8": "1"}
    return scenes(engine_python, published, "prefill_fp8_probe.py", SCENES, **asked)


def sent(held: int, fp8: int, bf16: int) -> dict[str, int]:
    """Bytes of `fp8` and `bf16` gathers of `held` rows, by dtype: values, fp32 scales for 32 columns, bf16 rows."""
    gathers = {"bfloat16": bf16 * held * HIDDEN * 2, "float8_e4m3fn": fp8 * held * HIDDEN}
    return {name: n for name, n in {**gathers, "float32": fp8 * held * GROUPS * 4}.items() if n}


def check(one: dict, ranks: int, fp8: int, beside: int = 0) -> None:
    """Of 4 layers `fp8` are gathered so: the first pass decides on bf16 rows, the second gathers values and scales, and
    `beside` of them in bf16 too."""
    held = one["case"][-1] // ranks
    assert one.get("equal", [True] * 2) == [True] * 2, one
    assert one["verdicts"] == [True] * fp8
    first, then = one["sent"]
    assert first == sent(held, fp8, 4), one
    assert then == sent(held, fp8, 4 - fp8 + beside), one
    assert one["counts"] == [fp8, fp8 * held * (HIDDEN + 4 * GROUPS), fp8 * held * HIDDEN * 2]
    # The released forward gets the pair, and rows of which nothing but NaN could be read, in no memory.
    assert one["handed"][0] == ["bf16"] * 4
    assert sorted(one["handed"][1]) == ["bf16"] * (4 - fp8) + ["tuple NaN 0"] * fp8, one


@pytest.mark.parametrize("release", RELEASES)
def test_exact_mode_with_fp8_gathers_gives_the_bytes_of_stock_on_four_ranks(probe, release):
    *layers, fp32, unfused, tail = agreed(probe(release, "exact:4"))
    assert [one["case"] for one in layers] == [[which, "powers", 256] for which in LAYERS[release]]
    for one in [*layers, fp32]:
        check(one, 4, fp8=2)
        assert one["kept"] == {FIRST: 2, ROUTER: 8, COMPRESSOR: 2, INDEXER: 2}
        scales = "fp32" if one is fp32 else "power-of-two"
        assert one["notes"][0] == "2 chunks sharded (exact), 0 stock"
        assert one["notes"][1] == (
            f"fp8 gathers: attention of layers 0, 1 ({scales} scales of 32 columns); in bf16: attention of layer 2 "
            f"({COMPRESSOR}), attention of layer 3 ({INDEXER}), experts of every layer ({ROUTER})"
        )
    assert layers[0]["notes"][2] == (
        "2 gathers in fp8, 0.01 MiB sent by each rank instead of 0.02; "
        f"14 in bf16: 2 {FIRST}, 8 {ROUTER}, 2 {COMPRESSOR}, 2 {INDEXER}"
    )
    check(unfused, 4, fp8=3)
    # The late layers run on the tail's rows, which are whole.
    assert tail["equal"] == [True, True], tail
    assert tail["handed"][1] == ["tuple NaN 0"] * 2 + ["bf16"] * 2
    assert tail["sent"][1] == sent(64, 2, 0)
    source = {COMPRESSOR: 2} if release == "0.5.23" else {}  # whose rows it writes before the tail
    assert tail["kept"] == {FIRST: 2, ROUTER: 4, **source}


@pytest.mark.parametrize("release", RELEASES)
def test_on_two_ranks(probe, release):
    results = agreed(probe(release, "few:2"))
    assert len(results) == len(LAYERS[release]) + 2
    *layers, tiles, halves = results
    for one in layers:
        check(one, 2, fp8=2)
    # MXFP8: 128 rows of scales are one run of bytes; other shards cannot be put together.
    assert tiles["equal"] == halves["equal"] == [True, True]
    assert tiles["sent"][1] == {"bfloat16": 2 * 128 * 128, "float8_e4m3fn": 2 * 128 * HIDDEN, "uint8": 2 * 128 * 4}
    assert tiles["handed"][1] == ["Mxfp8SwizzledInput NaN 0"] * 2 + ["bf16"] * 2
    assert halves["handed"][1] == ["bf16"] * 4
    assert halves["kept"]["shards not a multiple of 128 rows"] == 4


def test_the_reduce_scatter_form_and_compare(probe):
    seen = agreed(probe("0.5.23", "modes:4"))
    for name in ("fast", "compare"):
        check(seen[name], 4, fp8=2, beside=2)
        # 25 ops a chunk, and in the second the two projections.
        assert seen[name]["notes"][1].startswith("compare: 52 ops in 2 chunks, 0 differing bytes on every rank"), name
    # A bit turned in the first row, which rank 0 holds: rank 1's attention reads it too, and rank 1 says so.
    assert seen["off"] == ("compare: 52 ops in 2 chunks, rank 1: layer 1 attn fp8_gather: 1 of 24576 bytes differ")


def test_one_bit_of_one_ranks_projection_means_bf16_on_all_and_the_rank_is_named(probe):
    seen = agreed(probe("0.5.23", "one_rank_is_off:4"))
    assert seen["equal"] == [True] * 5
    sizes = {f"({layer}, {rows})": True for rows in (128, 64) for layer in range(4)}
    assert seen["verdicts"] == {**sizes, "(1, 128)": False}
    # Of the five passes the first of each size decides; for good, also when the bit is right again.
    assert seen["sent"] == [sent(32, 4, 4), sent(32, 3, 1), sent(16, 4, 4), sent(16, 4, 0), sent(32, 3, 1)]
    assert seen["kept"] == {FIRST: 8, ROUTER: 20, "did not check out": 2}
    assert seen["notes"][3:] == [
        "layer 1 attention at 128 rows: gathered in bf16, rank 2: input 0: output 0: 1 of 24576 bytes differ"
    ]


def test_one_rank_that_cannot_round_keeps_nobody_waiting(probe):
    seen = agreed(probe("0.5.23", "one_rank_cannot_round:4"))
    assert seen["equal"] == [True, True]
    assert seen["sent"] == [sent(32, 0, 4)] * 2
    why = "gathered in bf16, rank 1: input 0: the fast path raised RuntimeError: no kernel for this device"
    assert seen["notes"][3:] == [f"layer {layer} attention at 128 rows: {why}" for layer in (0, 1)]


def test_linears_that_make_or_take_no_pair_are_declined_with_the_reason(probe):
    seen = agreed(probe("0.5.23", "declines:4"))
    apart = "makes scales that cannot be put together from those of shards"
    deep = f"deepgemm_w8a8_block_fp8_linear_with_fallback {apart}"
    assert seen["forms"] == {
        "taken": "power-of-two scales of 32 columns",
        "marlin": "its input has no scales by groups",
        "one scale": "its input has no scales by groups",
        "cached": "a bf16 copy of its weight serves unrounded input only",
        "cutlass": f"cutlass_w8a8_block_fp8_linear_with_fallback {apart}",
        "deep_gemm, not Hopper": deep,
        "deep_gemm on Hopper": "power-of-two scales of 32 columns",
        "deep_gemm, fp32 scales": deep,
        "trtllm": "the MXFP8 backend flashinfer_trtllm has a layout of its own for scales",
        "cutedsl": "MXFP8, scales in 128x4",
    }
    plain = "UnquantizedLinearMethod rounds no input"
    assert seen["bf16"]["equal"] == [True, True]
    assert seen["bf16"]["kept"] == {plain: 4, ROUTER: 8, COMPRESSOR: 2, INDEXER: 2}
    assert seen["bf16"]["notes"][1].startswith(f"fp8 gathers: none; in bf16: attention of layers 0, 1 ({plain}), ")
    # One rank whose layer is another one: bf16 on every rank.
    assert (
        "attention of layer 0 (ranks 0,1,2: power-of-two scales of 32 columns; rank 3: a bf16 copy"
        in (seen["unequal"][1])
    )
