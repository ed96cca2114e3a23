"""Run by the engine's interpreter: each stand-in beside the engine's own code for the same thing. Prints JSON.

The engine's Triton kernels run in the interpreter here, on small shapes; its torch references run as they are.
"""

from __future__ import annotations

import json
from types import SimpleNamespace

import torch

torch.set_num_threads(1)

from dsv41_dist.rehearsal.formats import decode_mxfp4, encode_block_fp8, encode_mxfp4, encode_row_fp8  # noqa: E402
from dsv41_dist.rehearsal.stand_ins import formulas  # noqa: E402


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.float() - b.float()).abs().max() / b.float().abs().max())


def mhc(out: dict[str, object]) -> None:
    from sglang.kernels.ops.layernorm import mhc as engine

    mixes, scale, base = draw(1, 1, 5, 24), draw(2, 3), draw(3, 24)
    ours = formulas.split_sinkhorn(mixes, scale, base, 4, 20, 1e-6)
    theirs = engine._hc_split_sinkhorn_triton(mixes, scale, base, 4, 20, 1e-6)
    out["split_sinkhorn"] = [relative(a, b) for a, b in zip(ours, theirs, strict=True)]
    x, pre = draw(4, 5, 4 * 256).to(torch.bfloat16), draw(5, 5, 4)
    # fp32: the interpreter cuts bf16 off where a GPU rounds it.
    combined = engine.mhc_combine(x, pre, 4, torch.float32)
    out["mix_streams"] = torch.equal(formulas.mix_streams(x, pre, 4), combined)


def rope(out: dict[str, object]) -> None:
    from sglang.srt.layers.attention.dsv4.dsv41_sparse import rope_tail

    angles = draw(6, 50, 32)
    table = torch.polar(torch.ones_like(angles), angles)
    positions = torch.tensor([3, 0, 49, 17])
    x = draw(7, 4, 2, 64).to(torch.bfloat16)
    for inverse in (False, True):
        ours = x.clone()
        formulas.rotate_(ours, torch.view_as_real(table).flatten(-2), positions, inverse)
        out[f"rotate inverse={inverse}"] = torch.equal(ours, rope_tail(x, table[positions], 64, inverse))


def pages(out: dict[str, object]) -> None:
    from sglang.kernels.ops.attention.flash_mla_sm120 import _gather_and_dequant

    page, x = 256, draw(8, 6, 512) * 3
    width = -(-page * 584 // 576) * 576
    cache = torch.zeros(3, width, dtype=torch.uint8)
    slots = torch.tensor([0, 255, 256, -1, 700, 300])
    formulas.pack_pages(x, slots, cache, page)
    view = cache.view(torch.float8_e4m3fn).as_strided((3, page, 1, 584), (width, 584, 584, 1))
    keep = slots >= 0
    read = _gather_and_dequant(view, slots[keep], page)
    wanted = x[keep]
    out["page tail"] = torch.equal(read[:, 448:], wanted[:, 448:].to(torch.bfloat16))
    tile = wanted[:, :448].unflatten(-1, (7, 64))
    bound = tile.abs() / 16 + tile.abs().amax(-1, keepdim=True) / 448  # half a unit of e4m3, and its smallest step
    out["page codes"] = bool(((read[:, :448].float().unflatten(-1, (7, 64)) - tile).abs() <= bound).all())
    from dsv41_dist.rehearsal.stand_ins import install

    rows = torch.tensor([[0, 255, 0], [300, 256, 255]])
    stock = _gather_and_dequant(view, rows, page)
    module = SimpleNamespace(_gather_and_dequant=_gather_and_dequant)
    install._gather(module)
    out["gather once"] = torch.equal(module._gather_and_dequant(view, rows, page), stock)
    out["page elsewhere"] = int((_gather_and_dequant(view, torch.tensor([1, 254, 299, 701]), page) != 0).sum())


def fp8(out: dict[str, object]) -> None:
    from sglang.kernels.ops.gemm import fp8_kernel as engine

    engine.get_device_name = lambda *_: "cpu"  # names the file with tuned block sizes; None here
    x, weight = draw(9, 4, 128).to(torch.bfloat16), draw(10, 64, 128)
    codes, scale = encode_block_fp8(weight)
    rows, row_scale = encode_row_fp8(x)
    theirs = engine.w8a8_block_fp8_matmul_triton(
        rows, codes, row_scale.float(), scale.float(), [32, 32], output_dtype=torch.float32
    )
    ours = formulas.block_fp8_linear(x.float(), codes, scale)
    out["block_fp8_linear"] = relative(ours, theirs)
    free = formulas.block_fp8_linear(x.float(), codes, scale, order_free=True)
    out["order free"] = float((free - ours).abs().max())  # at most half a step of 1/16 for each of the four groups


def index(out: dict[str, object]) -> None:
    from sglang.kernels.ops.kvcache import dsv4_fp4_index_k_cache as cache_module
    from sglang.kernels.ops.quantization.fp4_indexer_quant import quantize_fp4_indexer_tensor

    x = torch.cat([draw(11, 4, 128), torch.zeros(1, 128), draw(12, 1, 128) * 1e-5, draw(13, 2, 128) * 300])
    x[0, :8] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])  # ties, at the group's own scale
    x[0, 8:32] = 0.0
    x = x.to(torch.bfloat16)
    codes, scales = formulas.index_key_codes(x)
    stock_codes, stock_scales = quantize_fp4_indexer_tensor(x, rne=True)
    out["index codes"] = torch.equal(codes, stock_codes)
    out["index scales"] = torch.equal(scales, stock_scales)
    ours, theirs = (torch.zeros(2, 256 * 68, dtype=torch.uint8) for _ in range(2))
    slots = torch.tensor([0, 5, 255, 256, 300, 301, 302, 511])
    cache_module.store_fp4_index_k_cache(x, theirs, slots, page_size=256, rne=True)
    formulas.pack_index_keys(stock_codes, stock_scales, ours, slots, 256)
    out["index cache"] = torch.equal(ours, theirs)


def index_scores(out: dict[str, object]) -> None:
    from sglang.kernels.ops.attention.dsv4 import fp4_indexer as engine
    from sglang.srt.layers.attention.dsv4.dsv41_sparse import DeepseekV41Indexer

    keys = draw(15, 6, 128).to(torch.bfloat16)
    codes, scales = formulas.index_key_codes(keys)
    table = torch.zeros(3, 256 * 68, dtype=torch.uint8)
    places = torch.tensor([0, 5, 255, 256, 300, 511])
    formulas.pack_index_keys(codes, scales, table, places, 256)
    exponents = scales.view(torch.uint8).view(-1, 4)
    decoded = decode_mxfp4(codes, torch.exp2(exponents.float() - 127)).to(torch.bfloat16)
    # As queries come: quantised to FP4, so that products are exact in fp32.
    q_codes, q_scales = formulas.index_key_codes(draw(16, 3 * 8, 128).to(torch.bfloat16))
    q_exponents = q_scales.view(torch.uint8).view(-1, 4).float() - 127
    q = decode_mxfp4(q_codes, torch.exp2(q_exponents)).to(torch.bfloat16).view(3, 8, 128)
    weights = draw(17, 3, 8).to(torch.bfloat16)
    order = torch.tensor([[0, 1, 2, 3, 4, 5], [5, 5, 0, 1, 0, 0], [3, 0, 0, 0, 0, 0]])
    lens = torch.tensor([6, 4, 0])
    ours = formulas.index_logits(q, weights, places[order], lens, table, 256)
    scores = DeepseekV41Indexer.scores(None, q, decoded, weights).gather(1, order)
    out["index logits"] = torch.equal(ours, scores.masked_fill(torch.arange(6) >= lens[:, None], -torch.inf))
    # No more of it than what is visible: the interpreter's dot takes the bits of bf16 for integers.
    theirs = engine.fp4_index_logits_decode(q, weights, places[order], lens, table, 256)
    out["index logits visible"] = torch.equal(ours.isinf(), theirs.isinf())


def router(out: dict[str, object]) -> None:
    from sglang.kernels.ops.moe import moe_fused_gate as engine
    from sglang.srt.layers.moe.topk import fused_topk_torch_native

    from dsv41_dist.rehearsal.stand_ins.router import by_one_program

    by_one_program(engine)
    scores, bias = draw(18, 7, 8) * 4, draw(19, 8) / 10
    weights, ids = engine.moe_fused_gate(
        scores, bias, topk=2, scoring_func="sqrtsoftplus", renormalize=True, sqrtsoftplus_log1p=True
    )
    wanted, wanted_ids = fused_topk_torch_native(scores, scores, 2, True, bias, "sqrtsoftplus")
    order, wanted_order = ids.sort(1), wanted_ids.sort(1)
    out["router ids"] = torch.equal(order.values.long(), wanted_order.values.long())
    out["router weights"] = relative(weights.gather(1, order.indices), wanted.gather(1, wanted_order.indices))


def experts(out: dict[str, object]) -> None:
    from sglang.srt.layers.quantization.fp8 import DSV4_DEQUANT_FP4_TABLE

    packed, scale = encode_mxfp4(draw(14, 8, 64))
    low, high = packed.view(torch.uint8) & 15, packed.view(torch.uint8) >> 4
    codes = torch.stack([low, high], -1).flatten(1).long()
    theirs = DSV4_DEQUANT_FP4_TABLE[codes] * scale.float().repeat_interleave(32, 1)
    out["mxfp4 table"] = torch.equal(decode_mxfp4(packed, scale), theirs)


def main() -> None:
    out: dict[str, object] = {}
    for check in (mhc, rope, pages, fp8, index, index_scores, router, experts):
        check(out)
    print(json.dumps(out))


main()
