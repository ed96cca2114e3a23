"""sm12x_dense_candidates on the real candidate factory of three releases, under faked compute capabilities."""

from __future__ import annotations

import json

import pytest

from dsv41_dist.adapters import REGISTRY
from dsv41_dist.engine import gpus
from dsv41_dist.engine.armed import enabled
from dsv41_dist.engine.gates import Gates
from tests.engine.real import HERE, RELEASES, engine_env, run_engine

pytestmark = pytest.mark.timeout(200)


def probe(engine_python, tree, **gates):
    result = run_engine(engine_python, [str(HERE / "sm12x_probe.py")], engine_env(tree, **gates))
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize("release", RELEASES)
def test_sm12x_gets_the_dense_scheme_and_nothing_else_changes(engine_python, published, release):
    out = probe(engine_python, published(release), DSV41_SM12X_DENSE="1")
    for key, (stock, ours) in out["seen"].items():
        capability, scores, topk_blocks = key.split()
        raises = float(capability) >= 10 and topk_blocks == "2048"
        assert stock.startswith("RuntimeError: the candidate indexer needs DeepGEMM") == raises, (key, stock)
        if capability.startswith("12") and raises:
            assert ours == f"DenseBlocksBackend one ['pool', 'table', 2048, 8] {scores == 'deep_gemm'}", key
        else:
            assert ours == stock, key
    state = out["state"]
    assert (state["state"], state["fired"], state["rebound_copies"]) == ("fired", 4, 0)
    assert state["notes"] == [
        "dense candidate blocks for prefill (scores by torch) and decode",
        "dense candidate blocks for prefill (scores by DeepGEMM) and decode",
    ]


class Nvml:
    """A driver's management library: what it knows of each device, or an error number in its place."""

    def __init__(self, *devices, init=0):
        self.devices, self.init, self.ended = devices, init, 0

    def nvmlInit_v2(self):
        return self.init

    def nvmlShutdown(self):
        self.ended += 1

    def nvmlDeviceGetCount_v2(self, count):
        count._obj.value = len(self.devices)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index, device):
        device._obj.value = index.value + 1
        return 0

    def nvmlDeviceGetCudaComputeCapability(self, device, major, minor):
        known = self.devices[device.value - 1]
        if isinstance(known, int):
            return known
        major._obj.value, minor._obj.value = known
        return 0


@pytest.mark.parametrize(
    ("devices", "auto"),
    [([], False), ([(9, 0)], False), ([(12, 1)], True), ([(9, 0), (12, 0)], True), ([3, (12, 0)], True), ([3], False)],
)
def test_auto_asks_the_driver(monkeypatch, devices, auto):
    nvml = Nvml(*devices)
    monkeypatch.setattr(gpus.ctypes, "CDLL", lambda name: nvml)
    assert gpus.compute_capabilities() == [known for known in devices if isinstance(known, tuple)]
    assert nvml.ended == 1
    for text, want in (("auto", auto), ("0", False), ("1", True)):
        on = enabled(Gates.from_env({"DSV41_SM12X_DENSE": text, "DSV41_FOLDED_FENCE": "1"}), REGISTRY)
        assert on == {"folded_result_fence", *(["sm12x_dense_candidates"] if want else [])}


def test_no_driver_and_a_driver_that_does_not_start_are_no_gpu(monkeypatch):
    def absent(name):
        raise OSError(name)

    monkeypatch.setattr(gpus.ctypes, "CDLL", absent)
    assert gpus.compute_capabilities() == []
    monkeypatch.setattr(gpus.ctypes, "CDLL", lambda name: Nvml((12, 1), init=9))
    assert gpus.compute_capabilities() == []
