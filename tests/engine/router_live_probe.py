"""Run by the engine's interpreter: the router made from the installed source against the stock router and a row copy,
bit for bit, through the gates that the adapters put in place. Prints JSON."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import torch
import triton.language as tl
from sglang.kernels.ops.moe import moe_fused_gate as stock_module

from dsv41_dist.adapters import _router_live_source as source
from dsv41_dist.adapters._speculative_live import LIVE
from dsv41_dist.kernels.verify_cap import copy_rows_torch

STRIDE, K = 6, 6
ALT = 3


class MathByTriton:
    """The interpreter has no body for libdevice: the same functions out of Triton's own."""

    exp = staticmethod(lambda x: tl.exp(x))
    sqrt = staticmethod(lambda x: tl.sqrt(x))
    log1p = staticmethod(lambda x: tl.log(1.0 + x))


live_module = next(m for name, m in sys.modules.items() if name.startswith("dsv41_dist_moe_fused_gate_live_"))
for module in (stock_module, live_module):
    module.libdevice = MathByTriton
    module.is_arch_support_pdl = lambda: False

gate = stock_module.moe_fused_gate
stock = gate
while hasattr(stock, "__wrapped__") and "dsv41_dist/adapters" in stock.__code__.co_filename:
    stock = stock.__wrapped__


def inputs(experts: int, bs: int, dtype: torch.dtype, wide: bool):
    gen = torch.Generator().manual_seed(experts + bs)
    scores = torch.randn(bs * STRIDE, experts + (8 if wide else 0), generator=gen).to(dtype)[:, :experts]
    scores[:, 10] = scores[:, 11]  # ties
    scores[3] = scores[2]
    bias = torch.randn(experts, generator=gen)
    bias[10] = bias[11]
    ids = torch.randint(0, 5, (bs * STRIDE,), generator=gen)
    ids[3] = ALT  # a dead row's token chooses the other bias, its anchor's does not
    ids[0] = 0
    live = torch.randint(2, STRIDE + 1, (bs,), generator=gen, dtype=torch.int32)
    live[0] = 2
    return (
        scores,
        bias,
        {"bias_alt": torch.randn(experts, generator=gen), "input_ids": ids, "bias_alt_token_id": ALT},
        live,
    )


def one(function, scores, bias, alt, padding, packed, in_use):
    kwargs = dict(alt)
    if padding:
        kwargs["num_token_non_padded"] = in_use
    third = torch.full((scores.shape[0], K), 77, dtype=torch.int32) if packed else None
    weights, ids = function(
        scores, bias, topk=K, scoring_func="sqrtsoftplus", renormalize=True, renormalize_epsilon=1e-20,
        sqrtsoftplus_log1p=True, routed_scaling_factor=1.5, apply_routed_scaling_factor_on_output=True,
        packed_out=third, **kwargs,
    )  # fmt: skip
    return weights, ids, third


def bits(tensors):
    return [None if tensor is None else tensor.contiguous().view(torch.uint8) for tensor in tensors]


def equal(left, right) -> bool:
    pairs = zip(bits(left), bits(right), strict=True)
    return all((a is None) == (b is None) and (a is None or torch.equal(a, b)) for a, b in pairs)


def main() -> None:
    cases = []
    # 64 experts: four rows a program, of different requests; 384: one.
    for (experts, bs), vision, padding, packed in itertools.product(
        ((64, 4), (384, 1)), (False, True), (False, True), (False, True)
    ):
        dtype, wide = (torch.bfloat16, True) if packed else (torch.float32, False)
        scores, bias, alt, live = inputs(experts, bs, dtype, wide)
        # Whole requests are in use: the engine pads a batch by requests.
        in_use = torch.tensor((bs - 1 or 1) * STRIDE, dtype=torch.int32)
        args = (scores, bias, alt if vision else {}, padding, packed, in_use)
        want = one(stock, *args)
        copy_rows_torch(*want, live, STRIDE, in_use if padding else None)
        LIVE.allocate(bs, STRIDE, STRIDE, "cpu")
        LIVE.buffer.copy_(live)
        with LIVE.scope(bs):
            got = one(gate, *args)
            routed = LIVE.routed
        plain = one(live_module.moe_fused_gate, *args)
        outside = one(gate, *args)
        untouched = one(stock, *args)
        cases.append(
            {
                "case": [experts, bs, vision, padding, packed],
                "equal": equal(got, want),
                "routed": routed,
                "changed": not equal(got, untouched),
                "no live rows": equal(plain, untouched),
                "outside the scope": equal(outside, untouched),
            }
        )

    # A gate of another number of rows, and one of another score function, are stock inside the scope.
    scores, bias, _, live = inputs(64, 2, torch.float32, False)
    LIVE.allocate(1, STRIDE, STRIDE, "cpu")
    others = []
    with LIVE.scope(1):
        others.append(
            equal(one(gate, scores, bias, {}, False, False, None), one(stock, scores, bias, {}, False, False, None))
        )
        sigmoid = {"topk": K, "scoring_func": "sigmoid"}
        others.append(equal(gate(scores[:STRIDE], bias, **sigmoid), stock(scores[:STRIDE], bias, **sigmoid)))
        others.append(LIVE.routed == 0)

    refused = []
    text = Path(stock_module.__file__).read_text()
    for old, _ in source.ANCHORS:
        for broken in (text.replace(old, old.replace("_", "-", 1)), text + "\n" + old):
            try:
                source.transform(broken)
                refused.append(False)
            except ValueError as error:
                refused.append("moe_fused_gate.py" in str(error))
    from dsv41_dist.engine import boot

    print(json.dumps({"cases": cases, "others": others, "refused": refused, "report": boot.report()}))


main()
