"""`bench prefill`: the row-local work by definition, the stack on one rank, the bound. The runs are in
tests/multirank; the kernels' cases are in prefill_kernels.py."""

from __future__ import annotations

import pytest
import torch

from dsv41_dist.cli import prefill_rows
from dsv41_dist.cli.memory import PeakMemory
from dsv41_dist.cli.prefill_report import draw, expected
from dsv41_dist.cli.prefill_rows import STREAMS, TILE, combine_norm, make_mixer, mix, post, row_bytes
from dsv41_dist.cli.prefill_stack import Shape, rows_in
from dsv41_dist.comm import ArgumentError
from tests.unit.bench import prefill_kernels

CPU = torch.device("cpu")
HIDDEN = 64


def inputs(rows: int = 2 * TILE, hidden: int = HIDDEN):
    gen = torch.Generator().manual_seed(rows + hidden)
    residual = torch.randn(rows, STREAMS, hidden, generator=gen).bfloat16()
    y = torch.randn(rows, hidden, generator=gen).bfloat16()
    return residual, y, make_mixer(hidden, 3, CPU), torch.rand(hidden, generator=gen).bfloat16()


def test_mix_is_its_formula():
    residual, _, mixer, _ = inputs()
    pre, po, co = mix(residual, mixer)
    flat = residual.reshape(len(residual), -1).double()
    mixed = flat @ mixer.fn.double().t() / (flat.square().mean(-1, keepdim=True) + 1e-6).sqrt() + mixer.base.double()
    torch.testing.assert_close(pre.double(), torch.sigmoid(mixed[:, :4]) + 1e-6, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(po.double(), 2 * torch.sigmoid(mixed[:, 4:8]), rtol=1e-5, atol=1e-5)
    # Sinkhorn: positive, and rows and columns of sum 1; the exponents keep the order of the logits of a 2 x 2 minor.
    torch.testing.assert_close(co.sum(1), torch.ones(len(co), 4), rtol=0, atol=1e-4)
    torch.testing.assert_close(co.sum(2), torch.ones(len(co), 4), rtol=0, atol=1e-3)
    logits = mixed[:, 8:].view(-1, 4, 4)
    minor = logits[:, 0, 0] + logits[:, 1, 1] - logits[:, 0, 1] - logits[:, 1, 0]
    found = co[:, 0, 0].log() + co[:, 1, 1].log() - co[:, 0, 1].log() - co[:, 1, 0].log()
    torch.testing.assert_close(found.double(), minor, rtol=0, atol=1e-3)


def test_post_and_combine_are_their_formulas():
    residual, y, mixer, weight = inputs()
    pre, po, co = mix(residual, mixer)
    want = po[:, :, None] * y[:, None].float() + torch.einsum("nts,nth->nsh", co, residual.float())
    torch.testing.assert_close(post(residual, y, po, co).float(), want, rtol=2**-7, atol=2**-7)
    read = (pre[:, :, None] * residual.float()).sum(1)
    want = read / (read.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.float()
    torch.testing.assert_close(combine_norm(residual, pre, weight).float(), want, rtol=2**-7, atol=2**-7)


def test_the_three_summands_of_the_weight_are_the_weight():
    mixer = make_mixer(HIDDEN, 3, CPU)
    back = mixer.parts.double().sum(0)
    torch.testing.assert_close(back[:24], mixer.fn.double(), rtol=2**-22, atol=1e-30)
    assert not back[24:].any()


def test_a_row_s_bits_do_not_depend_on_how_many_rows_there_are():
    residual, y, mixer, weight = inputs(rows=6 * TILE, hidden=256)
    whole = mix(residual, mixer)
    read, left = combine_norm(residual, whole[0], weight), post(residual, y, *whole[1:])
    for shard in (TILE, 2 * TILE, 3 * TILE):
        for at in range(0, len(residual), shard):
            part = slice(at, at + shard)
            mine = mix(residual[part], mixer)
            assert all(torch.equal(a, b[part]) for a, b in zip(mine, whole, strict=True))
            assert torch.equal(combine_norm(residual[part], mine[0], weight), read[part])
            assert torch.equal(post(residual[part], y[part], *mine[1:]), left[part])


@pytest.mark.parametrize("shape", [(TILE + 1, 4, 64), (TILE, 3, 64), (TILE, 4, 40)])
def test_shapes_that_the_row_work_does_not_take(shape):
    with pytest.raises(ValueError, match=r"residual is .*: allowed is"):
        prefill_rows.post(torch.zeros(shape).bfloat16(), torch.zeros(1), torch.zeros(1), torch.zeros(1))


def test_kernels_are_their_twins(interpreter):
    assert prefill_kernels.run() == prefill_kernels.CASES


def test_the_model_s_shape_and_its_bytes():
    shape = Shape.of(5120)
    assert (shape.heads * shape.head_dim // shape.groups, shape.o_lora) == (4096, 1024)
    assert shape.q_lora + shape.head_dim == 1792
    assert row_bytes(5120) == 184320
    # 2 flops a weight and row: wqkv_a, wq_b, wo_a, wo_b, 7 experts' three matrices, and 640 keys and values.
    weights = 5120 * 1792 + 1280 * 16384 + 16384 * 1024 + 4096 * 5120 + 7 * 3 * 5120 * 1152
    assert shape.flops(10, 2) == 2 * 10 * (weights + 2 * 16384 * 640)
    for world in (1, 2, 4, 8):
        shape.check(world)
    with pytest.raises(ArgumentError, match="3 ranks: 8 groups"):
        shape.check(3)
    assert [rows_in(world) for world in (1, 2, 4)] == [128, 128, 256]


PARTS = {
    "row_work_us": 100.0, "row_work_shard_us": 60.0, "all_reduce_us": 10.0, "reduce_scatter_us": 6.0,
    "all_gather_us": 5.0,
}  # fmt: skip


def test_the_bound_is_amdahl_s_and_the_parts_are_as_measured():
    # Stock 1000 us of which 100 row-local, 4 sublayers, 2 ranks.
    assert expected("fast", 1000, PARTS, 4, 2) == {"bound": round(1000 / 950, 3), "parts": round(1000 / 969, 3)}
    assert expected("exact", 1000, PARTS, 4, 2) == {"bound": round(1000 / 970, 3), "parts": round(1000 / 985, 3)}
    assert expected("comm", 1000, PARTS, 4, 2) == {"bound": 1.0, "parts": round(1000 / 1004, 3)}
    assert expected("fast", 40, PARTS, 4, 2) == {"bound": None, "parts": round(40 / 9, 3)}


def test_peak_memory_sees_what_was_there_for_a_moment():
    with PeakMemory(CPU) as peak:
        torch.zeros(16 << 20).add_(1.0)
    if peak.bytes is None:
        pytest.skip("this system does not let a process reset its high-water mark")
    assert 60 << 20 < peak.bytes < 200 << 20


def test_the_plot_is_drawn(tmp_path):
    rows = [{"op": "prefill parts", "rows": 256, "row_work_ratio": 1.9, "transport": "x", "layers": 2, "hidden": 64}]
    for mode in ("stock", "fast"):
        row = {"op": "prefill", "rows": 256, "mode": mode, "transport": "x", "peak_bytes": 100, "sent_bytes": 9}
        rows.append(row if mode == "stock" else row | {"over_stock": 1.1, "bound": None, "row_part_over_stock": 1.5})
    draw({"env": {"world_size": 2, "versions": {"torch": "x"}}, "rows": rows}, str(tmp_path / "x.svg"))
    assert (tmp_path / "x.svg").read_text().count('<g id="axes_') == 3
