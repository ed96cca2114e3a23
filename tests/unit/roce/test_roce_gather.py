"""roce_gather without an engine: the guarantee that its gates give."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from dsv41_dist.adapters.base import Guarantee
from dsv41_dist.adapters.roce_gather import RoceGather, _Collectives
from dsv41_dist.comm import SUM_DTYPES, ArgumentError
from dsv41_dist.engine.gates import Gates
from dsv41_dist.engine.state import AdapterState


@pytest.mark.parametrize("text", ["", "0", " 00 ", "1", "10", "0100"])
def test_sums_are_reordered_where_the_gate_routes_any(monkeypatch, text):
    monkeypatch.setenv("DSV41_ROCE_ALLREDUCE", text)
    routed = Gates.from_env()["DSV41_ROCE_ALLREDUCE"] > 0
    assert RoceGather().guarantee is (Guarantee.REORDERED_SUM if routed else Guarantee.BIT_IDENTICAL)


@pytest.mark.parametrize(
    "dtype",
    [*SUM_DTYPES, torch.bool, torch.uint16, torch.complex64, torch.float8_e4m3fn, torch.float8_e8m0fnu],
    ids=str,
)
def test_a_dtype_that_cannot_be_summed_is_left_to_the_engine(dtype):
    runtime = _Collectives(Gates.from_env({"DSV41_ROCE_ALLREDUCE": "64"}), AdapterState("roce_gather", "reordered sum"))
    runtime.transport = "roce"

    def route_name(op, x, **facts):
        if x.dtype not in SUM_DTYPES:
            raise ArgumentError("as the communicator does")
        return "roce"

    runtime.comm = SimpleNamespace(route_name=route_name)
    x = torch.zeros(4, dtype=torch.uint8).repeat(8).view(dtype)
    assert runtime.refusal("all_reduce", x, reduce_op="sum") == (None if dtype in SUM_DTYPES else "dtype")
