"""roce_gather without an engine: the guarantee that its gates give."""

from __future__ import annotations

import pytest

from dsv41_dist.adapters.base import Guarantee
from dsv41_dist.adapters.roce_gather import RoceGather
from dsv41_dist.engine.gates import Gates


@pytest.mark.parametrize("text", ["", "0", " 00 ", "1", "10", "0100"])
def test_sums_are_reordered_where_the_gate_routes_any(monkeypatch, text):
    monkeypatch.setenv("DSV41_ROCE_ALLREDUCE", text)
    routed = Gates.from_env()["DSV41_ROCE_ALLREDUCE"] > 0
    assert RoceGather().guarantee is (Guarantee.REORDERED_SUM if routed else Guarantee.BIT_IDENTICAL)
