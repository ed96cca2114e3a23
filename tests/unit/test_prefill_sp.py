"""prefill_sp without an engine: which gates go together, the guarantee they give, and the rewriting of row counts."""

import shutil
from types import SimpleNamespace

import pytest
import torch

from dsv41_dist.adapters import _prefill_rewrite
from dsv41_dist.adapters._prefill_debug import Debug
from dsv41_dist.adapters._prefill_rewrite import by_logical_rows
from dsv41_dist.adapters._prefill_runtime import Options, Prefill
from dsv41_dist.adapters.base import Guarantee
from dsv41_dist.adapters.prefill_sp import PrefillSp
from dsv41_dist.engine import refusal
from dsv41_dist.engine.gates import Gates
from dsv41_dist.engine.logical_rows import sharded_rows
from dsv41_dist.engine.state import AdapterState

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
        ({"": "1", "_DEBUG_CHUNKS": "3"}, "DSV41_PREFILL_SP_DEBUG_CHUNKS needs DSV41_PREFILL_SP_DEBUG=compare or fp"),
    ],
)
def test_gates_that_contradict_one_another_are_an_error(gates, said):
    with pytest.raises(ValueError, match=said):
        options(**gates)


def test_debug_gates():
    got = options(**{"": "1", "_DEBUG": "compare,fp", "_DEBUG_CHUNKS": "3", "_DEBUG_DUMP": "/tmp/x", "_WKV": "0"})
    assert got[2:] == (False, True, True, 3, "/tmp/x", False)


def debug_of(folder):
    comm = SimpleNamespace(ranks=SimpleNamespace(rank=1), agreement=SimpleNamespace(gather=lambda mine, label: [mine]))
    state = AdapterState("prefill_sp", "bit-identical")
    asked = options(**{"": "1", "_DEBUG": "compare", "_DEBUG_DUMP": str(folder)})
    return Debug(asked, comm, SimpleNamespace(layers=[]), state), state


def test_a_dump_folder_that_cannot_be_written_is_refused_at_boot_by_its_gate(tmp_path, monkeypatch):
    monkeypatch.setattr(refusal, "_first", [])
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(SystemExit, match=f"DSV41_PREFILL_SP_DEBUG_DUMP={file} cannot be written on rank 1"):
        debug_of(file)


def test_a_dump_that_can_no_longer_be_written_is_a_note(tmp_path):
    folder = tmp_path / "made" / "here"
    debug, state = debug_of(folder)
    assert list(folder.iterdir()) == []
    chunk = SimpleNamespace(scope=SimpleNamespace(take=lambda x: x))
    debug._compare(chunk, "layer 0 attn", "combine", torch.ones(2), torch.zeros(2))
    assert [file.name for file in folder.iterdir()] == ["chunk0_layer_0_attn_combine_1_rank1.pt"]
    shutil.rmtree(folder)
    debug._compare(chunk, "layer 1 attn", "combine", torch.ones(2), torch.zeros(2))
    debug.end_of_chunk()
    (note,) = state.notes
    assert "layer 1 attn combine: 4 of 8 bytes differ" in note
    assert f"DSV41_PREFILL_SP_DEBUG_DUMP={folder}: chunk0_layer_1_attn_combine_2_rank1.pt not written: " in note


def test_a_layer_whose_projection_stays_whole_is_one_note_however_many_sizes():
    agreement = SimpleNamespace(agree=lambda flag, label: flag, gather=lambda value, label: [value])
    comm, group = SimpleNamespace(agreement=agreement), SimpleNamespace(all_reduce=None)
    layers, state = [SimpleNamespace(engram=object()) for _ in range(2)], AdapterState("prefill_sp", "bit-identical")
    runtime = Prefill(comm, group, state, options(**{"": "1"}), SimpleNamespace(layers=layers), True)
    for rows in range(4, 20, 4):
        for layer in layers[: 1 + (rows == 8)]:
            runtime.check_wkv(layer.engram, rows, lambda x: x, lambda x: x + 1, torch.zeros(rows))
    assert state.notes == [
        "0 chunks sharded (fast), 0 stock; layer 0 engram.wkv whole at 4 sizes; layer 1 engram.wkv whole at 1 sizes",
        "layer 0 engram.wkv at 4 rows: whole on every rank, rank 0: input 0: 8 of 16 bytes differ",
        "layer 1 engram.wkv at 8 rows: whole on every rank, rank 0: input 0: 16 of 32 bytes differ",
    ]


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
