"""What the rehearsal does on GPUs, as far as a machine without one can show it."""

from __future__ import annotations

import importlib
import os
import sys

import pytest
import torch

from dsv41_dist.cli.rehearse import rehearse
from dsv41_dist.comm.errors import ArgumentError
from dsv41_dist.rehearsal.gate_sets import cannot_fire
from dsv41_dist.rehearsal.report import as_json, stand_ins, text
from dsv41_dist.rehearsal.settings import Boot, engine_environment
from dsv41_dist.rehearsal.stand_ins import ON_GPU, absent
from dsv41_dist.rehearsal.stand_ins.formulas import expert_mlp
from dsv41_dist.rehearsal.stand_ins.on_gpu import write_absent
from dsv41_dist.rehearsal.verdict import Outcome
from dsv41_dist.rehearsal.worker import server_arguments
from tests.rehearsal.fixture import printed


def gpu_boot(**given) -> Boot:
    return Boot("", (), **{"device": "cuda", "absent": ("sgl_kernel", "deep_gemm", "flashinfer", "tilelang"), **given})


@pytest.fixture
def no_trace(monkeypatch):
    """Import state as before, whatever the test imports."""
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(absent, "FUNCTIONS", dict(absent.FUNCTIONS))
    known = set(sys.modules)
    yield
    for name in set(sys.modules) - known:
        del sys.modules[name]


@pytest.mark.usefixtures("no_trace")
def test_an_absent_package_can_be_imported_and_says_what_it_was_called_with():
    absent.FUNCTIONS["absent_one.real"] = lambda value: value + 1
    absent.become("absent_one")
    module = importlib.import_module("absent_one.deeper.still")
    import absent_one  # type: ignore[import-not-found]

    assert absent_one.real(1) == 2
    assert not absent_one.something
    assert isinstance(module.Thing, type)
    with pytest.raises(
        NotImplementedError, match=r"absent_one.kernel\(\(2, 3\):torch.float32, 7\): not on this machine"
    ):
        absent_one.kernel(torch.zeros(2, 3), 7)


@pytest.mark.usefixtures("no_trace")
@pytest.mark.parametrize(
    ("code", "missing"),
    [("", False), ("raise OSError('wants a newer torch')", True), ("import not_there_at_all", True)],
)
def test_a_package_that_does_not_load_is_lacking(tmp_path, monkeypatch, code, missing):
    (tmp_path / "half_there.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    assert absent.lacking(["half_there", "nowhere_at_all"]) == [*(["half_there"] if missing else []), "nowhere_at_all"]


def test_only_what_the_engine_imports_unasked_gets_a_package(tmp_path):
    write_absent(tmp_path, ["sgl_kernel", "flashinfer", "torchvision"])
    assert [path.name for path in tmp_path.iterdir()] == ["sgl_kernel"]


def test_the_environment_of_a_gpu_boot_has_the_real_kernels(tmp_path):
    env = engine_environment(gpu_boot(tp=2, tree="/engine"), tmp_path, "tag", {"CUDA_VISIBLE_DEVICES": "0,1"})
    assert env["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert "TRITON_INTERPRET" not in env
    assert env["SGLANG_ENABLE_JIT_DEEPGEMM"] == "0"
    path = env["PYTHONPATH"].split(os.pathsep)
    assert path.index("/engine") < path.index(str(tmp_path / "absent"))
    assert not any(part.endswith("modules") for part in path)  # torchvision is there
    whole = engine_environment(gpu_boot(absent=()), tmp_path, "tag", {})
    assert "SGLANG_ENABLE_JIT_DEEPGEMM" not in whole
    assert "SGLANG_OPT_USE_TILELANG_MHC_PRE" not in whole


def test_the_arguments_of_a_gpu_boot_follow_what_is_absent():
    given = server_arguments(gpu_boot(graphs=True))
    assert (given["device"], given["disable_cuda_graph"], given["moe_runner_backend"]) == ("cuda", False, "triton")
    assert given["disable_custom_all_reduce"]
    whole = server_arguments(gpu_boot(absent=()))
    assert whole["disable_cuda_graph"]
    assert "moe_runner_backend" not in whole
    assert server_arguments(gpu_boot(absent=(), order_free=True))["moe_runner_backend"] == "triton"


def test_the_report_names_the_stand_ins_that_were_in_use():
    outcome = Outcome("stock", 2, stand_ins=["sgl_kernel", "sinkhorn"], absent=["sgl_kernel", "tilelang"])
    assert [item.name for item in stand_ins([outcome])] == ["sgl_kernel", "sinkhorn"]
    printed = text([outcome], None, [], [], "head", 1.0)
    assert "Packages that do not load on this machine: sgl_kernel, tilelang" in printed
    assert "mxfp4_experts" not in printed
    data = as_json([outcome], None, [], [], 1.0, "head", {"gpus": ["one"]})
    assert (data["environment"], data["command"]) == ({"gpus": ["one"]}, "head")
    assert {"sgl_kernel", "mxfp4_experts"} <= {item.name for item in ON_GPU}


def test_why_an_adapter_cannot_fire_depends_on_the_device():
    fence = "folded_result_fence"
    assert [bool(cannot_fire(fence, *where)) for where in (("cpu",), ("cuda",), ("cuda", True))] == [True, True, False]
    assert cannot_fire("sm12x_dense_candidates", "cuda", True)
    assert cannot_fire("hc_fused", "cuda") != cannot_fire("hc_fused")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"device": "tpu"}, "--device 'tpu': allowed is cpu or cuda"),
        ({"graphs": True}, "--graphs: only with --device cuda"),
        ({"engine_folder": "/nowhere"}, "--engine-folder '/nowhere': there is no sglang/ in it"),
        ({"engine_folder": "/a", "engine_version": "0.5.22"}, "allowed is one of them"),
        ({"logs": "/"}, "--logs /: is there already"),
    ],
)
def test_bad_arguments_are_refused_by_name(given, said):
    with pytest.raises(ArgumentError, match=said):
        rehearse(tp="2", **given)


def test_every_expert_on_every_row_gives_what_the_chosen_ones_give():
    gen = torch.Generator().manual_seed(3)
    draw = lambda *shape: torch.randn(*shape, generator=gen)  # noqa: E731
    x, w13, w2 = draw(9, 64).bfloat16(), draw(4, 192, 64) / 8, draw(4, 64, 96) / 8
    ids = torch.stack([torch.randperm(4, generator=gen)[:2] for _ in range(9)])
    ids[3, 1] = -1
    weights = draw(9, 2).abs()
    for free in (False, True):
        chosen = expert_mlp(x, w13, w2, weights, ids, 10.0, free, 1.5)
        every = expert_mlp(x, w13, w2, weights, ids, 10.0, free, 1.5, static=True)
        torch.testing.assert_close(every, chosen, rtol=2**-7, atol=2**-7)
        if free:
            assert torch.equal(every, chosen)
    other = expert_mlp(x, w13, w2, weights, ids.flip(1), 10.0, False, 1.5, static=True)
    assert not torch.allclose(other, chosen, rtol=0.1, atol=0.1)


@pytest.fixture(scope="module")
def probed(rehearsal_python) -> dict:
    return printed(rehearsal_python, "on_gpu_probe.py", 200)


@pytest.mark.timeout(220)
def test_the_norms_are_those_of_fp64_and_no_row_depends_on_another(probed):
    for size in ("1 x 256", "5 x 320", "7 x 1792"):
        found = probed[size]
        assert found["rmsnorm"] < 1e-5, size
        assert found["normed"] < 1e-5, size
        assert [found[what] for what in ("into", "rows alone", "sum")] == [True, True, True], size
    assert probed["silu"] < 1e-5
    assert probed["silu in place"]


def test_a_norm_of_tensors_that_the_kernel_would_read_or_write_wrongly_is_refused(probed):
    refused = probed["refused"]
    assert [what for what, said in refused.items() if not said.startswith("norm stand-in: x (")] == []
    assert refused["three dimensions"].startswith("norm stand-in: x (2, 3, 4)")
    assert "residual (3, 8) strides (16, 1)" in refused["strided residual"]


def test_the_engine_knows_every_argument_of_a_gpu_boot(probed):
    assert probed["unknown arguments"] == []


def test_the_stand_ins_take_what_sgl_kernel_takes(probed):
    """Signatures of sglang-kernel 0.4.10 (elementwise.py), whose binary needs the torch of its release."""
    assert probed["signatures"] == {
        "rmsnorm": ["input", "weight", "eps", "out", "enable_pdl"],
        "fused_add_rmsnorm": ["input", "residual", "weight", "eps", "enable_pdl"],
        "silu_and_mul": ["input", "out"],
    }
