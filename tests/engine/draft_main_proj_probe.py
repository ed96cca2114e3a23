"""Run by the engine's interpreter: draft_main_proj on the real draft class and ReplicatedLinear, on gloo ranks. Prints
JSON."""

from __future__ import annotations

import hashlib
import json
import sys

import torch
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import ReplicatedLinear
from sglang.srt.model_executor import model_runner  # noqa: F401  (a patched module: it must import)
from sglang.srt.models.deepseek_v4_dspark import DeepseekV4ForCausalLMDSpark

from dsv41_dist.adapters import draft_main_proj
from dsv41_dist.adapters._split_main_proj import read_columns
from dsv41_dist.kernels.main_proj import weight_of
from tests.engine import split_fp8
from tests.engine.split_ranks import bits, run_world, runner, state_of

N, K = 640, 256  # 10 tiles of 64: 3/3/2/2 over four ranks


def draft(main_proj: torch.nn.Module) -> DeepseekV4ForCausalLMDSpark:
    """The real class with what its project_target_hidden reads; its constructor wants a whole configuration."""
    model = DeepseekV4ForCausalLMDSpark.__new__(DeepseekV4ForCausalLMDSpark)
    torch.nn.Module.__init__(model)
    stage = torch.nn.Module()
    stage.main_proj = main_proj
    stage.main_norm = RMSNorm(N)
    stage.main_norm.weight.data.normal_(1, 0.1)
    stage.requires_grad_(False)
    model.stages = torch.nn.ModuleList([stage])
    return model


def plain(weight: torch.Tensor) -> ReplicatedLinear:
    layer = ReplicatedLinear(K, N, bias=False, params_dtype=torch.bfloat16)
    layer.weight.data.copy_(weight)
    return layer.requires_grad_(False)


def dequantized(layer: ReplicatedLinear) -> torch.Tensor:
    scale = layer.weight_scale_inv.repeat_interleave(32, 0).repeat_interleave(32, 1)
    return (layer.weight.float() * scale).bfloat16()


def attach(args, model, **changed) -> list[str]:
    state = state_of("draft_main_proj")
    before = len(state.notes)
    draft_main_proj.attach(runner(args, model, is_draft_worker=True, **changed), state)
    return state.notes[before:]


def digest(x: torch.Tensor) -> str:
    return hashlib.sha256(bits(x)).hexdigest()


def served(rank, args):
    """Each layout: the weight that is read out, the result against float64, its bits on every rank."""
    state = state_of("draft_main_proj")
    out = {}
    block, mxfp8 = split_fp8.block_layer(N, K), split_fp8.mxfp8_layer(N, K)
    layers = {"block fp8": block, "mxfp8": mxfp8, "bf16": plain(dequantized(block))}
    for name, layer in layers.items():
        weight = layer.weight if name == "bf16" else dequantized(layer)
        model = draft(layer)
        stock = DeepseekV4ForCausalLMDSpark.project_target_hidden.__wrapped__
        # Equal as numbers: a sum with terms that are 0 loses the sign of a weight of -0, and no product needs it.
        one = {"read": torch.equal(read_columns(layer, 0, N), weight), "notes": attach(args, model)}
        proj = vars(model)[draft_main_proj._PROJ]
        lo = proj._split.start(rank)
        one["twin"] = torch.equal(weight_of(proj.twin), weight[lo : lo + proj._split.size(rank)])
        x = torch.randn(17, K, generator=torch.Generator().manual_seed(3)).bfloat16()
        exact = (x.double() @ weight.double().t()).float()
        norm = model.stages[0].main_norm
        want = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon) * norm.weight.float()
        one["bits"], one["near"], one["fired"], one["alone"] = {}, [], [], []
        rows = (1, 6, 16, 17)
        whole = proj(x[:16])
        for m in rows:
            before = state.fired
            got = model.project_target_hidden(x[:m])
            one["fired"].append(state.fired - before)
            one["bits"][m] = digest(got)
            one["near"].append(float(((got.float() - want[:m]).abs() / want[:m].abs().mean()).max()))
            if m <= 16:
                one["alone"].append(bits(proj(x[:m])) == bits(whole[:m]))
        one["stock"] = bits(model.project_target_hidden(x)) == bits(stock(model, x))
        one["stock near"] = float(((stock(model, x[:16]).float() - want[:16]).abs() / want.abs().mean()).max())
        one["memory"] = state.memory_bytes
        out[name] = one
    return out


def declined(rank, args):
    """What has no twin, on all ranks or on one; another class; a target model."""
    out = {}
    gen = torch.Generator().manual_seed(1)
    weight = torch.randn(N, K, generator=gen).bfloat16()
    twin = dequantized(split_fp8.block_layer(N, K))
    spoiled = twin.clone()
    spoiled[400, 7] = 1.0078125  # eight significant bits, in rank 2's columns: 384 to 511
    biased = plain(twin)
    biased.bias = torch.nn.Parameter(torch.zeros(N, dtype=torch.bfloat16), requires_grad=False)
    for name, layer in {"no twin": plain(weight), "one rank": plain(spoiled), "bias": biased}.items():
        model = draft(layer)
        notes = attach(args, model)
        x = torch.randn(2, K, generator=gen).bfloat16()
        stock = DeepseekV4ForCausalLMDSpark.project_target_hidden.__wrapped__
        out[name] = [notes, bits(model.project_target_hidden(x)) == bits(stock(model, x))]
    state = state_of("draft_main_proj")
    draft_main_proj.attach(runner(args, draft(plain(twin))), state)
    draft_main_proj.attach(runner(args, torch.nn.Module(), is_draft_worker=True), state)
    out["others"] = [state.notes[3:], state.fired]
    return out


SCENES = {f.__name__: f for f in (served, declined)}


def main() -> None:
    out = {}
    for asked in sys.argv[1:]:
        name, _, size = asked.partition(":")
        out[asked] = run_world(int(size), SCENES[name])
    print(json.dumps(out))


main()
