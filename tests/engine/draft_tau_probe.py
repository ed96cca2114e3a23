"""Run by the engine's interpreter: what the real draft functions make of a request's temperature, and what law the
real accept is given for it. Prints JSON."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import torch
from sglang.srt.speculative.dspark_components import dspark_draft, dspark_draft_sampler, dspark_verify, dspark_worker_v2
from sglang.srt.speculative.spec_tp_sync import SpecTpSync

from tests.engine.speculative_stand_ins import STRIDE, VOCAB, Markov, draft_model, sampling_info, worker_init

BS, MAX_BS = 3, 4
TEMPERATURES = [[0.7], [1.0], [1e-5]]
RELEASE = sys.argv[1]


def info():
    # The second request is greedy.
    return sampling_info(TEMPERATURES, top_ks=[1 << 30, 1, 1 << 30])


def sync():
    return SpecTpSync(SimpleNamespace(world_size=1, rank_in_group=0))


def make_sampler():
    kwargs = {"model": draft_model(), "gamma": STRIDE - 1, "max_bs": MAX_BS, "device": "cpu", "tp_sync": sync()}
    if RELEASE != "0.5.21":
        kwargs |= {"noise": dspark_draft.DraftNoise(key=1, offset=torch.zeros(1, dtype=torch.int64))}
        kwargs |= {"greedy_draft": False}
    return dspark_draft_sampler.DsparkDraftSampler(**kwargs)


def buffers(sampler):
    params = sampler if RELEASE == "0.5.21" else sampler.params
    names = ["temperatures", "greedy_mask"] + ([] if RELEASE == "0.5.21" else ["step_temperatures"])
    return {name: getattr(params, name) for name in names}


def staged() -> dict:
    sampler = make_sampler()
    before = {name: tensor.data_ptr() for name, tensor in buffers(sampler).items()}
    given = info()
    kept = given.temperatures.clone()
    sampler.stage_sampling_params(bs=BS, sampling_info=given)
    assert torch.equal(given.temperatures, kept)
    out = {name: tensor[:BS].tolist() for name, tensor in buffers(sampler).items()}
    assert {name: tensor.data_ptr() for name, tensor in buffers(sampler).items()} == before
    sampler.stage_sampling_params(bs=BS, sampling_info=None)
    out["none"] = buffers(sampler)["temperatures"][:BS].tolist()
    return out


def eager() -> dict:
    """The real sample_draft_block with a Markov head that records the law that it was asked to sample from."""
    seen: list[torch.Tensor] = []
    real = dspark_draft.SampleStepTokens if RELEASE == "0.5.21" else dspark_draft.MarkovSampleStep

    class Recorder:
        @staticmethod
        def execute(**kwargs):
            seen.append(kwargs["temperatures"].clone())
            if RELEASE == "0.5.21":
                return real.torch(**kwargs)
            logits = kwargs["base_logits"].float()
            kwargs["logits_out"].copy_(logits)
            return logits.argmax(-1)

    setattr(dspark_draft, real.__name__, Recorder)
    kwargs = {
        "base_logits": torch.randn(BS, STRIDE - 1, VOCAB),
        "anchor_tokens": torch.zeros(BS, dtype=torch.int64),
        "draft_hidden": None,
        "sampling_info": info(),
        "markov_head": Markov(),
        "device": torch.device("cpu"),
        "tp_sync": sync(),
    }
    if RELEASE != "0.5.21":
        kwargs |= {"noise": dspark_draft.DraftNoise(key=1, offset=torch.zeros(1, dtype=torch.int64))}
        kwargs |= {"greedy_draft": False}
    block = dspark_draft.sample_draft_block(**kwargs)
    sampled_at = [tensor.tolist() for tensor in seen]
    assert len(sampled_at) == STRIDE - 1
    assert all(one == sampled_at[0] for one in sampled_at)
    return {"sampled at": sampled_at[0], "tested at": block.temperatures.tolist()}


def region() -> dict:
    """What the sampling-accept region hands to the accept: (target's temperatures, draft's temperatures)."""
    from sglang.srt.speculative.dspark_components import dspark_sampling_accept_graph as module

    sampler = make_sampler()
    sampler.step_logits = torch.zeros(MAX_BS, STRIDE - 1, VOCAB)
    seen = []

    def accept(**kwargs):
        seen.append((kwargs["sampling_info"].temperatures, kwargs["draft_block"].temperatures))
        zeros = torch.zeros(BS, dtype=torch.int32)
        return zeros, zeros.long(), zeros

    module.accept_draft_tokens = accept
    epilogue = dspark_verify.DsparkVerifyEpilogue(
        max_bs=MAX_BS, verify_num_draft_tokens=STRIDE, device="cpu", tp_sync=sync()
    )
    io = SimpleNamespace(
        candidates=torch.zeros(BS, STRIDE, dtype=torch.int64),
        logits=torch.zeros(BS * STRIDE, VOCAB),
        seq_lens=torch.zeros(BS, dtype=torch.int64),
    )
    out = []
    for temperatures in (TEMPERATURES, [[2.0], [1.0], [3.0]]):
        sampler.stage_sampling_params(bs=BS, sampling_info=sampling_info(temperatures, top_ks=[1 << 30] * BS))
        module.sampling_accept_commit_lens(
            io,
            verify_lens=torch.full((BS,), STRIDE),
            gate=torch.ones(1),
            gated=False,
            draft_sampler=sampler,
            epilogue=epilogue,
            tp_sync=sync(),
            fused_argmax=False,
            block_verification=False,
            rejection_noise=None,
        )
        target, draft = seen[-1]
        out.append({"target": target.tolist(), "draft": draft.tolist(), "shapes": [list(target.shape)]})
    assert seen[0][0].data_ptr() == seen[1][0].data_ptr(), "the address is baked into the captured region"
    return {"steps": out}


def main() -> None:
    torch.manual_seed(0)
    worker_init(dspark_worker_v2, {})
    out = {"staged": staged(), "eager": eager()}
    if RELEASE == "0.5.23":
        out["region"] = region()
    from dsv41_dist.engine import boot

    print(json.dumps(out | {"report": boot.report()}))


main()
