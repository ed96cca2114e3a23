"""Every stand-in against a formula here, and against the engine's own code in its interpreter (stand_in_probe.py)."""

from __future__ import annotations

import math

import pytest
import torch

from dsv41_dist.rehearsal.settings import HERE
from dsv41_dist.rehearsal.stand_ins import STAND_INS, formulas
from dsv41_dist.rehearsal.stand_ins.install import UnusedRope
from dsv41_dist.rehearsal.stand_ins.jit import load_jit
from tests.rehearsal.fixture import printed


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def beside(rehearsal_python) -> dict:
    return printed(rehearsal_python, "stand_in_probe.py", 300, str(HERE / "modules"), SGLANG_USE_CPU_ENGINE="0")


@pytest.mark.timeout(320)
@pytest.mark.parametrize(
    "what",
    [
        "mix_streams",
        "rotate inverse=False",
        "rotate inverse=True",
        "page tail",
        "page codes",
        "gather once",
        "index codes",
        "index scales",
        "index cache",
        "index logits",
        "index logits visible",
        "router ids",
        "mxfp4 table",
    ],
)
def test_the_same_as_the_engines_own(beside, what):
    assert beside[what] is True


def test_as_close_to_the_engines_own_as_fp32_sums_are(beside):
    assert max(beside["split_sinkhorn"]) < 1e-6
    assert beside["block_fp8_linear"] < 1e-6
    assert beside["router weights"] < 1e-6
    assert beside["page elsewhere"] == 0
    # Four groups, each rounded to the nearest sixteenth.
    assert 0 < beside["order free"] <= 4 / 32


def test_order_free_products_do_not_depend_on_the_split():
    x, weight = draw(1, 5, 128), draw(2, 7, 128) / 8
    whole = formulas.order_free_product(x, weight)
    for split in (2, 4):
        parts = [
            formulas.order_free_product(a, b).to(torch.bfloat16)
            for a, b in zip(x.chunk(split, 1), weight.chunk(split, 1), strict=True)
        ]
        for order in (parts, parts[::-1]):
            total = order[0]
            for part in order[1:]:
                total = total + part
            assert torch.equal(total, whole.to(torch.bfloat16))
    plain = [a @ b.t() for a, b in zip(x.chunk(4, 1), weight.chunk(4, 1), strict=True)]
    assert not torch.equal(sum(p.to(torch.bfloat16) for p in plain), (x @ weight.t()).to(torch.bfloat16))


@pytest.mark.parametrize("limit", [None, 1.5])
def test_experts_by_the_formula(limit):
    x, w13, w2 = draw(3, 4, 32), draw(4, 3, 2 * 32, 32) / 4, draw(5, 3, 32, 32) / 4
    ids = torch.tensor([[0, 2], [1, -1], [2, 1], [-1, -1]])
    weights = draw(6, 4, 2).abs()
    got = formulas.expert_mlp(x, w13, w2, weights, ids, limit)
    for row in range(4):
        wanted = torch.zeros(32)
        for slot in range(2):
            expert = int(ids[row, slot])
            if expert >= 0:
                gate, up = (w13[expert] @ x[row]).split(32)
                if limit is not None:
                    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
                pairs = zip(gate.tolist(), up.tolist(), strict=True)
                hidden = torch.tensor([g / (1 + math.exp(-g)) * u for g, u in pairs])
                wanted += weights[row, slot] * (w2[expert] @ hidden)
        torch.testing.assert_close(got[row], wanted, rtol=1e-5, atol=1e-5)


def test_a_key_is_normed_then_rotated():
    kv, weight = draw(7, 3, 512), 1 + draw(8, 512) / 10
    angles = draw(9, 10, 32)
    table = torch.view_as_real(torch.polar(torch.ones(10, 32), angles)).flatten(-2)
    positions = torch.tensor([4, 0, 9])
    got = formulas.key_norm_rope(kv, weight, table, positions, 1e-6)
    for row in range(3):
        scale = 1 / math.sqrt(float((kv[row] ** 2).mean()) + 1e-6)
        wanted = kv[row] * scale * weight
        torch.testing.assert_close(got[row, :448], wanted[:448])
        for pair in range(32):
            angle = float(angles[positions[row], pair])
            re, im = float(wanted[448 + 2 * pair]), float(wanted[449 + 2 * pair])
            turned = complex(re, im) * complex(math.cos(angle), math.sin(angle))
            assert abs(complex(*got[row, 448 + 2 * pair : 450 + 2 * pair].tolist()) - turned) < 1e-4


def test_a_kernel_without_a_stand_in_says_which_one_it_is():
    with pytest.raises(NotImplementedError, match=r"dpsk_v4_topk.*\.run\(\(2,\):torch.float32, 3\)"):
        load_jit("dpsk_v4_topk", "x").run(torch.zeros(2), 3)


def test_what_is_said_to_be_unused_raises_when_it_is_used():
    with pytest.raises(NotImplementedError, match="forward"):
        UnusedRope().forward()
    with pytest.raises(NotImplementedError, match=r"rotary_emb\(\)"):
        UnusedRope()(1)


def test_block_fp8_refuses_another_group():
    with pytest.raises(ValueError, match="activation group 128: allowed is 32"):
        formulas.block_fp8_linear(torch.zeros(1, 32), torch.zeros(32, 32), torch.ones(1, 1), 128)


def test_the_list_names_each_stand_in_once_and_says_how_it_was_checked():
    names = [item.name for item in STAND_INS]
    assert len(names) == len(set(names))
    assert all(item.real and item.instead and item.checked for item in STAND_INS)
