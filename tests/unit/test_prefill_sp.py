"""prefill_sp without an engine: which gates go together, the guarantee they give, and the rewriting of row counts."""

import pytest

from dsv41_dist.adapters import _prefill_rewrite
from dsv41_dist.adapters._prefill_rewrite import by_logical_rows
from dsv41_dist.adapters._prefill_runtime import Options
from dsv41_dist.adapters.base import Guarantee
from dsv41_dist.adapters.prefill_sp import PrefillSp
from dsv41_dist.engine.gates import Gates
from dsv41_dist.engine.logical_rows import sharded_rows

SMALL = 8


def options(**gates):
    return Options.from_gates(Gates.from_env({f"DSV41_PREFILL_SP{name}": value for name, value in gates.items()}))


@pytest.mark.parametrize(
    ("gates", "mode"), [({"": "1"}, "fast"), ({"": "1", "_EXACT": "1"}, "exact"), ({"": "comm"}, "comm")]
)
def test_a_mode_follows_from_the_gates(gates, mode):
    assert options(**gates)[:3] == (mode, 2048, True)


@pytest.mark.parametrize(
    ("gates", "said"),
    [
        ({"": "comm", "_FP8": "1"}, "gathers nothing that DSV41_PREFILL_SP_FP8=1 could make fp8"),
        ({"": "comm", "_EXACT": "1"}, "swaps the all-reduce that DSV41_PREFILL_SP_EXACT=1 keeps"),
        ({"": "1", "_DEBUG_DUMP": "/tmp/x"}, "DSV41_PREFILL_SP_DEBUG_DUMP needs DSV41_PREFILL_SP_DEBUG=compare"),
        ({"": "1", "_DEBUG_DUMP": "/tmp/x", "_DEBUG": "fp"}, "needs DSV41_PREFILL_SP_DEBUG=compare"),
    ],
)
def test_gates_that_contradict_one_another_are_an_error(gates, said):
    with pytest.raises(ValueError, match=said):
        options(**gates)


def test_debug_gates():
    got = options(**{"": "1", "_DEBUG": "compare,fp", "_DEBUG_CHUNKS": "3", "_DEBUG_DUMP": "/tmp/x", "_WKV": "0"})
    assert got[2:] == (False, True, True, 3, "/tmp/x", False)


def test_fp8_gathers_go_with_both_sums():
    assert [options(**{"": "1", "_FP8": "1", **more}).fp8 for more in ({}, {"_EXACT": "1"})] == [True, True]


def test_the_guarantee_is_that_of_the_mode(monkeypatch):
    monkeypatch.delenv("DSV41_PREFILL_SP_EXACT", raising=False)
    assert PrefillSp().guarantee is Guarantee.REORDERED_SUM
    monkeypatch.setenv("DSV41_PREFILL_SP_EXACT", "1")
    assert PrefillSp().guarantee is Guarantee.BIT_IDENTICAL


class Rows:
    """Something with a shape."""

    def __init__(self, *shape):
        self.shape = shape


def chooses(x, hc_fn, m=1, *, wide=3):
    height, width = x.shape
    size = x.shape[0]
    grid = (x.shape[0], width)
    assert x.shape == (height, width)
    many = 4 <= x.shape[0] < 16
    return many, height <= SMALL, size == 2, m >= 8, grid, hc_fn.shape[0] == 2, width == wide, height == size


def test_only_comparisons_of_a_row_count_with_a_number_are_rewritten():
    new, found = by_logical_rows(chooses)
    assert found == ("4 <= x.shape[0] < 16", "height <= SMALL", "size == 2", "m >= 8")
    assert (new.__defaults__, new.__kwdefaults__, new.__name__) == (chooses.__defaults__, {"wide": 3}, "chooses")
    shard, weight = Rows(2, 3), Rows(2, 9)
    assert new(shard, weight) == chooses(shard, weight)
    with sharded_rows(2, 8):
        # The grid, the shapes and what is no row count stay those of the shard.
        assert new(shard, weight, 2) == (True, True, False, True, (2, 3), True, True, True)
        assert chooses(shard, weight, 2) == (False, True, True, False, (2, 3), True, True, True)
        assert new(Rows(5, 3), weight) == chooses(Rows(5, 3), weight)


def masks(self, input_ids, other):
    return input_ids == self.config.image_token_id, other == self.config.image_token_id


def test_ids_beside_rows_pass_through_own_rows():
    class Model:
        class config:
            image_token_id = 7

    new, found = by_logical_rows(masks, lambda ids: ids + 1)
    assert found == ("input_ids == self.config.image_token_id",)
    assert new(Model, 6, 6) == (True, False)


def test_what_would_not_be_the_installed_function_is_refused():
    def wrapped(x):
        return x.shape[0] > 4

    def closes(x):
        return x.shape[0] > 4 and shard

    shard = Rows(2)
    with pytest.raises(ValueError, match="closure"):
        by_logical_rows(closes)
    wrapped.__wrapped__ = chooses
    with pytest.raises(ValueError, match="was wrapped by another adapter"):
        by_logical_rows(wrapped)
    with pytest.raises(ValueError, match="compares no row count"):
        by_logical_rows(_prefill_rewrite._call)
