"""The runtime of a split layer without an engine: what each rank computes and how it is put together, for random
widths, tiles, group sizes, rows and dtypes. All ranks are layers of one process; tests/engine has real ranks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv41_dist.adapters._split_group import exchanged
from dsv41_dist.adapters._split_linear import Checks, SplitLayer, SplitOptions
from dsv41_dist.comm import TileSplit
from dsv41_dist.engine.logical_rows import sharded_rows
from dsv41_dist.engine.state import AdapterState


class UnquantizedLinearMethod:
    def apply(self, layer, x, bias=None):
        return torch.nn.functional.linear(x, layer.weight, bias)


def stock(layer, x):
    return layer.quant_method.apply(layer, x, None if layer.skip_bias_add else layer.bias), None


def layer_of(n: int, k: int, dtype: torch.dtype, bias: bool) -> torch.nn.Module:
    """Small whole numbers: every order of the sum gives the same bits, so only the split can make a difference."""
    layer = torch.nn.Module()
    layer.quant_method = UnquantizedLinearMethod()
    layer.weight = torch.nn.Parameter(torch.randint(-2, 3, (n, k)).to(dtype), requires_grad=False)
    held = torch.nn.Parameter(torch.randint(-2, 3, (n,)).to(dtype), requires_grad=False) if bias else None
    layer.register_parameter("bias", held)
    layer.skip_bias_add = False
    return layer


class Together:
    """The communicator of one rank, in a process that holds every rank's layer: a gather computes the others' part."""

    def __init__(self, rank: int, size: int, everyone: list, needs_prepare: bool = False) -> None:
        self.ranks = SimpleNamespace(rank=rank, size=size)
        self.agreement = SimpleNamespace(agree=lambda flag, label: flag, gather=lambda value, label: [value])
        self.transports = {"one": SimpleNamespace(needs_prepare=needs_prepare)}
        self.everyone = everyone
        self.prepared: list = []
        self.x: torch.Tensor | None = None

    def prepare(self, calls, label):
        self.prepared.append(calls)

    def all_gather(self, x, dim, *, label):
        split = self.everyone[0].split
        parts = [layer._columns(self.x) for layer in self.everyone]
        parts = [torch.nn.functional.pad(part, (0, split.widest - part.shape[1]), value=9) for part in parts]
        assert x.shape == parts[0].shape, "every rank must send the same shape"
        assert torch.equal(
            x[:, : split.size(self.ranks.rank)], parts[self.ranks.rank][:, : split.size(self.ranks.rank)]
        )
        return torch.cat(parts, dim)

    def all_gather_columns(self, x, split, *, label):
        assert x.shape[1] == split.size(self.ranks.rank)
        return torch.cat([layer._own(layer._columns(self.x)) for layer in self.everyone], 1)


def group(layer, split: TileSplit, options: SplitOptions, needs_prepare: bool = False):
    everyone: list[SplitLayer] = []
    comms = [Together(rank, split.world, everyone, needs_prepare) for rank in range(split.world)]
    for comm in comms:
        checks = Checks(comm, AdapterState("replicated_split", "bit-identical"))
        everyone.append(SplitLayer("layer", layer, split, checks, options))
    return comms, everyone


@given(
    world=st.integers(2, 6),
    spare=st.integers(0, 7),
    tile=st.sampled_from([16, 64, 128]),
    k=st.integers(1, 40),
    rows=st.integers(1, 9),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    window=st.booleans(),
    compact=st.booleans(),
    bias=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_put_together_it_is_the_whole_layer(world, spare, tile, k, rows, dtype, window, compact, bias):
    split = TileSplit((world + spare) * tile, tile, world)
    layer = layer_of(split.n, k, dtype, bias)
    comms, everyone = group(layer, split, SplitOptions(8, window, compact, lambda: False))
    x = torch.randint(-2, 3, (rows, k)).to(dtype)
    want, _ = stock(layer, x)
    for comm, part in zip(comms, everyone, strict=True):
        comm.x = x
        first, _ = part.forward(stock, x)
        second, _ = part.forward(stock, x)
        assert torch.equal(first, want)
        assert torch.equal(second.view(torch.uint8), want.view(torch.uint8))
        uneven = compact and not split.even
        verdict = [] if rows > 8 else ["compact" if uneven else "padded"]
        assert list(part._variants.values()) == verdict
        assert part._checks.state.fired == len(verdict)
        assert part._width == (split.widest if window else split.size(comm.ranks.rank))
    whole, mine = everyone[-1].weight_bytes
    assert whole == layer.weight.nbytes
    assert mine == everyone[-1]._width * k * layer.weight.element_size()


def test_gathers_are_declared_once_with_every_ranks_shape_before_a_capture():
    split = TileSplit(14 * 128, 128, 4)
    layer = layer_of(split.n, 8, torch.float32, False)
    comms, everyone = group(layer, split, SplitOptions(8, True, True, lambda: False), needs_prepare=True)
    for comm, part in zip(comms, everyone, strict=True):
        comm.x = torch.ones(2, 8)
        part.forward(stock, comm.x)
        part.forward(stock, comm.x)
        shapes = [[(call.op, call.shape) for call in calls] for calls in comm.prepared]
        assert shapes == [
            [("all_gather", (2, 512))],
            [("all_gather_columns", (2, 512)), ("all_gather_columns", (2, 384))],
        ]


def test_a_shard_of_a_prefill_chunk_is_stock_also_where_its_height_is_known():
    layer = layer_of(64, 8, torch.float32, False)
    split = TileSplit.plan(64, 16, 2)
    options = SplitOptions(max_rows=96, window=False, compact=False, stock_only=lambda: False)
    comms, everyone = group(layer, split, options)
    x = torch.ones(4, 8)
    comms[0].x = x
    everyone[0].forward(stock, x)  # decides
    everyone[0].forward(stock, x)
    assert everyone[0]._checks.state.fired == 1
    with sharded_rows(4, 8):
        out, _ = everyone[0].forward(stock, x)
    assert everyone[0]._checks.state.fired == 1
    assert torch.equal(out, stock(layer, x)[0])


def test_an_autotuning_run_and_a_batch_dimension_are_stock():
    split = TileSplit(256, 128, 2)
    layer = layer_of(256, 8, torch.float32, False)
    tuning = [True]
    comms, everyone = group(layer, split, SplitOptions(8, True, False, lambda: tuning[0]))
    part, comms[0].x = everyone[0], torch.ones(2, 8)
    part.forward(stock, comms[0].x)
    assert not part._variants
    tuning[0] = False
    assert torch.equal(part.forward(stock, torch.ones(3, 2, 8))[0], stock(layer, torch.ones(3, 2, 8))[0])
    assert part.forward(stock, torch.ones(0, 8))[0].shape == (0, 256)
    assert not part._variants
    part.forward(stock, comms[0].x)
    assert list(part._variants.values()) == ["padded"]


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ([{}, {}], {}),
        ([{"a": "why"}, {"a": "why"}], {"a": "why"}),
        ([{}, {"a": "why"}], {"a": "rank 1: why"}),
        ([{"a": "x"}, {"a": "y"}, {"a": "x"}], {"a": "ranks 0,2: x; rank 1: y"}),
    ],
)
def test_reasons_of_the_ranks_are_put_together(said, told):
    comm = SimpleNamespace(agreement=SimpleNamespace(gather=lambda value, label: said))
    assert exchanged(comm, {}, "t") == told
