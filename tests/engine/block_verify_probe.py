"""Run by the engine's interpreter: the real accept functions with block_verify on, against the twin and against the
stock function (and, where the release has it, the native kernel). Prints JSON."""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace

import torch
from sglang.srt.speculative.dspark_components import dspark_verify, dspark_worker_v2
from sglang.srt.speculative.dspark_components.dspark_draft import DraftBlockResult

from dsv41_dist.adapters._speculative_live import LiveCutoff
from dsv41_dist.adapters.block_verify import _NOISE_DOMAIN
from dsv41_dist.kernels.block_verify import NoiseState, block_verify_torch
from tests.engine.speculative_stand_ins import sampling_info, worker_init

RELEASE = sys.argv[1]
NATIVE = os.environ.get("DSV41_BLOCK_VERIFY") == "native"
BS, STRIDE, VOCAB, SEED = 4, 4, 16, 7
ALL = 1 << 30

accept = dspark_verify.accept_draft_tokens
stock = accept.__wrapped__


def draft_block(gen, greedy, greedy_draft=False):
    logits = torch.randn(BS, STRIDE - 1, VOCAB, generator=gen)
    temperatures = torch.tensor([0.6, 1.0, 1.4, 1.0])
    probs = torch.softmax(logits / temperatures.view(-1, 1, 1), -1)
    tokens = torch.multinomial(probs.view(-1, VOCAB), 1, generator=gen).view(BS, STRIDE - 1)
    fields = {
        "draft_tokens": tokens,
        "corrected_logits": None if greedy_draft else logits,
        "greedy_mask": torch.tensor(greedy),
        "temperatures": temperatures,
        "greedy_draft": greedy_draft,
    }
    return DraftBlockResult(**{name: fields[name] for name in DraftBlockResult.__struct_fields__})


def case(seed, top_ks=None, top_ps=None, greedy_draft=False):
    gen = torch.Generator().manual_seed(seed)
    top_ks = top_ks or [ALL] * BS
    block = draft_block(gen, [k <= 1 for k in top_ks], greedy_draft)
    candidates = torch.cat([torch.zeros(BS, 1, dtype=torch.int64), block.draft_tokens], 1)
    base = torch.zeros(BS, STRIDE - 1, VOCAB) if greedy_draft else block.corrected_logits
    target = torch.cat([base, torch.zeros(BS, 1, VOCAB)], 1) + 0.7 * torch.randn(BS, STRIDE, VOCAB, generator=gen)
    info = sampling_info([[0.8], [1.0], [1.2], [0.5]], top_ks, top_ps)
    return {
        "candidates": candidates,
        "target_logits": target.view(BS * STRIDE, VOCAB),
        "draft_block": block,
        "sampling_info": info,
        "draft_input": SimpleNamespace(max_top_k=min(max(top_ks), VOCAB), uniform_top_k_value=None),
        "gamma": STRIDE - 1,
        "verify_num_draft_tokens": STRIDE,
    }


def twin(noise, kwargs, law=None, live=None):
    block = kwargs["draft_block"]
    return block_verify_torch(
        candidates=kwargs["candidates"],
        target=kwargs["target_logits"] if law is None else law.view(BS * STRIDE, VOCAB),
        draft_logits=block.corrected_logits,
        target_temperatures=kwargs["sampling_info"].temperatures if law is None else None,
        draft_temperatures=block.temperatures,
        noise=noise,
        live=live,
    )


def same(left, right) -> bool:
    return all(torch.equal(a.long(), b.long()) for a, b in zip(left, right, strict=True))


def ours(out) -> None:
    from sglang.srt.speculative import dflash_utils

    law_of = (
        getattr(dflash_utils, "build_speculative_verify_target_probs", None)
        or dflash_utils.build_dflash_verify_target_probs
    )
    noise = NoiseState(SEED ^ _NOISE_DOMAIN, "cpu")
    zeros = torch.zeros(BS, dtype=torch.int32)

    sampled, dtypes = [], set()
    for seed in range(5):
        kwargs = case(seed)
        got = accept(**kwargs)
        want = twin(noise, kwargs)
        sampled.append(same(got, (want.correct_len, want.bonus, zeros)))
        dtypes.add((*map(str, (t.dtype for t in got)), *map(str, (t.dtype for t in stock(**kwargs)))))
    out["sampled"], out["dtypes"] = sampled, sorted(dtypes)

    truncated, supported = [], []
    for seed in range(5):
        kwargs = case(10 + seed, top_ks=[3, ALL, 5, 2], top_ps=[0.9, 1.0, 0.7, 1.0] if seed % 2 else None)
        got = accept(**kwargs)
        draft_input = vars(kwargs["draft_input"])
        law = law_of(
            next_token_logits=kwargs["target_logits"],
            sampling_info=kwargs["sampling_info"],
            draft_token_num=STRIDE,
            bs=BS,
            **draft_input,
        )
        want = twin(noise, kwargs, law)
        truncated.append(same(got, (want.correct_len, want.bonus, zeros)))
        supported.append(bool((law[torch.arange(BS), got[0].long(), got[1]] > 0).all()))
    out["top-k and top-p"], out["in support"] = truncated, supported

    kwargs = case(20, top_ks=[1, ALL, 1, ALL])
    kwargs["draft_input"].max_top_k = VOCAB
    got = accept(**kwargs)
    law = law_of(
        next_token_logits=kwargs["target_logits"],
        sampling_info=kwargs["sampling_info"],
        draft_token_num=STRIDE,
        bs=BS,
        **vars(kwargs["draft_input"]),
    )
    want = twin(noise, kwargs, law)
    greedy = stock(**(kwargs | {"sampling_info": None}))
    out["mixed, sampled rows"] = same([t[1::2] for t in got], [want.correct_len[1::2], want.bonus[1::2], zeros[1::2]])
    out["mixed, greedy rows"] = same([t[::2] for t in got], [t[::2] for t in greedy])

    live = torch.tensor([2, 3, 4, 2], dtype=torch.int32)
    capped = []
    for seed in range(5):
        kwargs = case(30 + seed)
        got = accept(**kwargs, cutoff_layout=LiveCutoff(live))
        want = twin(noise, kwargs, live=live)
        capped.append(same(got, (want.correct_len, want.bonus, zeros)) and bool((got[0] < live).all()))
    out["capped"] = capped

    if RELEASE != "0.5.21":
        kwargs = case(40, greedy_draft=True)
        got = accept(**kwargs)
        want = twin(noise, kwargs)
        out["one-hot draft"] = same(got, (want.correct_len, want.bonus, zeros))


def stock_paths(out) -> None:
    """Greedy batches, simulated accepts and ragged verify: the stock results, and the noise untouched."""
    before = out["fired"]()
    kwargs = case(50)
    greedy = kwargs | {"sampling_info": sampling_info([[1.0]] * BS, [1] * BS)}
    out["greedy"] = same(accept(**greedy), stock(**greedy))
    simulated = kwargs | {"sampling_info": None}
    out["simulated"] = same(accept(**simulated), stock(**simulated))
    ragged = kwargs | {"cutoff_layout": SimpleNamespace(verify_lens=torch.tensor([2, 4, 3, 1]))}
    results = []
    for function in (accept, stock):
        torch.manual_seed(3)
        results.append([t.clone() for t in function(**ragged)])
    out["ragged"] = same(*results)
    out["fired on stock paths"] = out.pop("fired")() - before


def native(out) -> None:
    """With native, the result is that of the engine's own flag."""
    equal, differs = [], 0
    for seed in range(12):
        kwargs = case(60 + seed)
        results = []
        for function, extra in ((accept, {}), (stock, {"block_verification": True}), (stock, {})):
            torch.manual_seed(seed)
            results.append([t.clone() for t in function(**kwargs, **extra)])
        equal.append(same(results[0], results[1]))
        differs += not same(results[0], results[2])
    out["native"], out["differs from the token rule"] = equal, differs


def kernel_decisions(out, wanted: int) -> None:
    """The native kernel and the twin, given the same coins."""
    from sglang.kernels.ops.speculative.reject_sampling import chain_speculative_sampling_triton

    gen = torch.Generator().manual_seed(11)
    noise = NoiseState(1, "cpu")
    compared = wrong = near = 0
    kinds, bs = ("plain", "equal", "one-hot", "zeros", "top-1", "close"), 12
    for trial in range(wanted // bs):
        kind, vocab, gamma = kinds[trial % 6], (5, 7, 33)[trial // 6 % 3], (2, 3, 5, 1)[trial // 6 % 4]
        p = torch.softmax(2 * torch.randn(bs, gamma + 1, vocab, generator=gen), -1)
        q = torch.softmax(p[:, :gamma].log() + 0.7 * torch.randn(bs, gamma, vocab, generator=gen), -1)
        if kind == "equal":
            q = p[:, :gamma].clone()
        if kind == "close":
            q = torch.softmax(p[:, :gamma].log() + 1e-3 * torch.randn(bs, gamma, vocab, generator=gen), -1)
        if kind == "zeros":
            p[..., ::2] = 0
            p = p / p.sum(-1, keepdim=True)
        if kind == "top-1":
            p = torch.zeros_like(p).scatter_(-1, p.argmax(-1, keepdim=True), 1.0)
        x = torch.multinomial(q.reshape(-1, vocab), 1, generator=gen).view(bs, gamma)
        if kind == "one-hot":
            q = torch.zeros_like(q).scatter_(-1, x.unsqueeze(-1), 1.0)
        candidates = torch.cat([torch.zeros(bs, 1, dtype=torch.int64), x], 1)
        index = torch.arange(bs * (gamma + 1)).view(bs, gamma + 1)
        predicts = torch.zeros(bs * (gamma + 1), dtype=torch.int32)
        accept_index = torch.zeros(bs, gamma + 1, dtype=torch.int32)
        number = torch.zeros(bs, dtype=torch.int32)
        coins, last = torch.rand(bs, gamma, generator=gen), torch.rand(bs, generator=gen)
        chain_speculative_sampling_triton(
            predicts, accept_index, number, candidates, index, None, None, coins, last, p, q, 1.0, 1.0, True,
            block_verification=True,
        )  # fmt: skip
        verdict = block_verify_torch(
            candidates=candidates,
            target=p.view(-1, vocab),
            draft_logits=None if kind == "one-hot" else q.log(),
            target_temperatures=None,
            draft_temperatures=torch.ones(bs),
            noise=noise,
            coins=coins,
        )
        differ = verdict.correct_len != number
        # q comes back through a logarithm here: a coin within rounding of a threshold may fall either way.
        close = ((coins - verdict.thresholds[:, 1:]).abs() < 2e-6).any(-1)
        wrong += int((differ & ~close).sum())
        near += int(close.sum())
        compared += bs
    out["same coins"] = {"compared": compared, "wrong": wrong, "near a threshold": near}


def main() -> None:
    from dsv41_dist.engine import boot

    worker_init(dspark_worker_v2, {}, seed=SEED)
    out: dict = {"fired": lambda: boot.report()["adapters"][0]["fired"]}
    stock_paths(out)
    if NATIVE:
        native(out)
    else:
        ours(out)
        if RELEASE != "0.5.21":
            kernel_decisions(out, 1008 if RELEASE == "0.5.23" else 144)
            if RELEASE == "0.5.23":
                from sglang.srt.speculative.dspark_components import dspark_sampling_accept_graph as region

                out["region uses it"] = region.accept_draft_tokens is accept
    print(json.dumps(out | {"report": boot.report()}))


main()
