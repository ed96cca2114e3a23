"""The parts of the command line that are plain functions."""

import os

import pytest

from dsv41_dist.cli.bench import compare_with_baseline, parse_size
from dsv41_dist.cli.checks import CHECKS, Result, check
from dsv41_dist.cli.ops import OPERATIONS, Case
from dsv41_dist.cli.session import choose_place
from dsv41_dist.cli.spawn import run_ranks
from dsv41_dist.cli.timing import summarise
from dsv41_dist.comm import ArgumentError


@pytest.mark.parametrize(
    ("text", "size"), [("8", 8), ("64K", 65536), ("1.5M", 3 << 19), ("2g", 2 << 30), ("1KiB", 1024), ("64G", 64 << 30)]
)
def test_sizes_are_binary(text, size):
    assert parse_size("-b", text) == size


@pytest.mark.parametrize("text", ["", "K", "-1", "0", "1T", "1e3", "65G", "8 8"])
def test_what_is_no_size(text):
    with pytest.raises(ArgumentError, match="-b"):
        parse_size("-b", text)


def test_an_iteration_takes_as_long_as_its_slowest_rank():
    line = summarise([[1.0, 2.0, 9.0], [3.0, 1.0, 4.0]])
    assert (line["time_us"], line["p50_us"], line["p99_us"]) == (4.667, 3.0, 9.0)
    assert line["slowest_rank"] == 1
    assert summarise([[2.0, 2.0]])["cv"] == 0.0


def _row(p50, **changes):
    row = {"op": "all_reduce", "bytes": 8, "dtype": "int32", "redop": "sum", "transport": "x", "graph": 0}
    return {**row, "p50_us": p50, **changes}


def test_the_baseline_rule():
    base = {"rows": [_row(9.0)]}
    assert compare_with_baseline([_row(10.0)], base) == []
    assert "0.82 of the baseline's speed" in compare_with_baseline([_row(11.0)], base)[0]
    assert compare_with_baseline([_row(1.0, op="other")], base) == ["no line of this run is in the baseline"]


@pytest.mark.parametrize(
    ("op", "nbytes", "busbw"),
    [
        ("all_reduce", 6 * 256 * 2, 1.5),
        ("all_gather", 4 * 6 * 256 * 2, 0.75),
        ("reduce_scatter", 4 * 6 * 256 * 2, 0.75),
        ("all_gather_columns", 6 * 256 * 2, 0.75),
        ("broadcast", 6 * 256 * 2, 1.0),
        ("agree", 8, 1.0),
    ],
)
def test_bytes_and_bus_factors_are_those_of_nccl_tests(op, nbytes, busbw):
    case = Case(op, 6, 256, "bfloat16", "sum", 4)
    assert OPERATIONS[op].size(case) == nbytes
    assert OPERATIONS[op].factor(4) == busbw


def test_a_check_registers_once():
    before = list(CHECKS)
    try:
        check("made_up", "Made up")(lambda context: Result())
        assert CHECKS[-1].name == "made_up"
        with pytest.raises(ValueError, match="made_up"):
            check("made_up", "Again")(lambda context: Result())
    finally:
        CHECKS[:] = before


def test_launchers_are_found_in_the_environment():
    torchrun = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "x", "MASTER_PORT": "1"}
    place = choose_place(None, torchrun)
    assert (place.launcher, place.rank, place.size, place.speaks) == ("torchrun", 1, 4, False)
    place = choose_place(None, {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"})
    assert (place.launcher, place.size, place.speaks) == ("mpirun", 2, True)
    assert choose_place(None, {}).size == 4
    assert choose_place(7, {}).size == 7
    with pytest.raises(ArgumentError, match="torchrun has started 4 ranks"):
        choose_place(4, torchrun)
    with pytest.raises(ArgumentError, match="mixed launchers"):
        choose_place(None, {**torchrun, "PMIX_RANK": "0"})


@pytest.mark.parametrize("text", ["", "0", "auto", "2,1", "-1", "9" * 12])
def test_threads_that_a_rank_cannot_take_are_refused_before_it_is_started(text, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    with pytest.raises(ArgumentError, match=f"OMP_NUM_THREADS='{text}': allowed is one integer"):
        run_ranks(1, print)


def test_a_guarantee_is_that_of_the_gates_that_are_rehearsed(monkeypatch):
    from dsv41_dist.adapters import REGISTRY, Guarantee
    from dsv41_dist.cli.rehearse import _guarantees

    monkeypatch.setenv("DSV41_PREFILL_SP", "comm")
    adapters = [adapter for adapter in REGISTRY if adapter.name == "prefill_sp"]
    exact = {"DSV41_PREFILL_SP": "1", "DSV41_PREFILL_SP_EXACT": "1"}
    assert _guarantees(adapters, exact) == {Guarantee.BIT_IDENTICAL}
    assert _guarantees(adapters, {"DSV41_PREFILL_SP": "1"}) == {Guarantee.REORDERED_SUM}
    assert os.environ["DSV41_PREFILL_SP"] == "comm"
    assert "DSV41_PREFILL_SP_EXACT" not in os.environ
