"""Microseconds a step of the speculative kernels, beside their plain-torch twins, deciding the same.

On a GPU both run inside CUDA graphs. On a CPU the kernels' entry points run the twins, so the two columns say nothing
there but that the benchmark works.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ..kernels.block_verify import (
    _TOKENS,
    BlockVerdict,
    NoiseState,
    block_laws,
    block_verify,
    block_verify_torch,
    coins_of,
)
from ..kernels.philox import exponential
from ..kernels.verify_cap import copy_rows, copy_rows_torch, live_rows, live_rows_torch
from .timing import local_times
from .verify_router import EXPERTS, TOP_K

if TYPE_CHECKING:
    from .bench_verify import VerifyPlan

__all__ = ["HEADER", "line_of", "time_kernels"]

HEADER = (
    f"{'kernel':<26}{'requests':>9}{'kernel us':>12}{'twin us':>12}{'twin/kernel':>13}"
    f"{'one us':>10}{'four us':>10}{'bytes':>12}{'GB/s':>9}{'decided':>9}{'differ':>8}{'#wrong':>8}"
)
_CHECKED = 4  # steps that are compared before timing
_NEAR = 1e-3  # of a coin and its threshold, or of two tokens in a race, in float32: either is right


def time_kernels(plan: VerifyPlan) -> Iterator[dict[str, Any]]:
    """One line for each kernel and number of requests."""
    for bs in plan.requests:
        yield _block(plan, bs, capped=False)
        yield _block(plan, bs, capped=True)
        yield _live(plan, bs)
        yield _copy(plan, bs)


def line_of(row: dict[str, Any]) -> str:
    one, four = (
        f"{row[way]:>10.2f}" if way in row else f"{'-':>10}" for way in ("one_launch_p50_us", "four_launches_p50_us")
    )
    return (
        f"{row['kernel']:<26}{row['requests']:>9}{row['p50_us']:>12.2f}{row['twin_p50_us']:>12.2f}"
        f"{row['twin_over_kernel']:>13.2f}{one}{four}{row['bytes']:>12}{row['algbw_gbps']:>9.1f}{row['decided']:>9}"
        f"{row['differ']:>8}{row['wrong']:>8}"
    )


def _row(
    plan: VerifyPlan,
    kernel: str,
    bs: int,
    calls: tuple[Callable[[], Any], Callable[[], Any]],
    nbytes: int,
    decided: int,
    differ: int,
    wrong: int,
) -> dict[str, Any]:
    ours, twin = (local_times(call, plan.iterations, plan.graphs, plan.device == "cuda") for call in calls)
    p50, twins = statistics.median(ours), statistics.median(twin)
    return {
        "op": "verify kernel", "kernel": kernel, "requests": bs, "vocab": plan.kernel_vocab, "drafts": plan.drafts,
        "graph": plan.graphs, "p50_us": round(p50, 3), "p99_us": round(max(ours), 3), "twin_p50_us": round(twins, 3),
        "twin_over_kernel": round(twins / p50, 3), "bytes": nbytes, "algbw_gbps": round(nbytes / p50 / 1e3, 3),
        "decided": decided, "differ": differ, "wrong": wrong,
    }  # fmt: skip


def _requests(plan: VerifyPlan, bs: int, seed: int) -> dict[str, torch.Tensor]:
    """Arguments of block_verify: drafts drawn from a draft's law that is near the target's."""
    gen = torch.Generator(plan.device).manual_seed(seed)
    gamma, vocab = plan.drafts, plan.kernel_vocab
    target = 3 * torch.randn(bs, gamma + 1, vocab, generator=gen, device=plan.device)
    draft = target[:, :gamma] + 0.7 * torch.randn(bs, gamma, vocab, generator=gen, device=plan.device)
    t_temp = 0.5 + torch.rand(bs, generator=gen, device=plan.device)
    d_temp = 0.9 * t_temp
    law = torch.softmax(draft / d_temp.view(-1, 1, 1), -1).view(-1, vocab)
    x = torch.multinomial(law, 1, generator=gen).view(bs, gamma)
    anchor = torch.zeros(bs, 1, dtype=torch.int64, device=plan.device)
    return {
        "candidates": torch.cat([anchor, x], 1),
        "target": target.view(bs * (gamma + 1), vocab),
        "draft_logits": draft,
        "target_temperatures": t_temp,
        "draft_temperatures": d_temp,
    }


def _lengths(plan: VerifyPlan, bs: int, seed: int) -> torch.Tensor:
    gen = torch.Generator(plan.device).manual_seed(seed)
    low = min(2, plan.drafts + 1)
    return torch.randint(low, plan.drafts + 2, (bs,), generator=gen, device=plan.device, dtype=torch.int32)


def _block(plan: VerifyPlan, bs: int, capped: bool) -> dict[str, Any]:
    differ = wrong = 0
    for seed in range(_CHECKED):
        given = _requests(plan, bs, seed)
        live = _lengths(plan, bs, seed) if capped else None
        coins = coins_of(NoiseState(seed, plan.device), bs, plan.drafts)
        got = block_verify(**given, noise=NoiseState(seed, plan.device), live=live)
        want = block_verify_torch(**given, noise=NoiseState(seed, plan.device), live=live)
        other = (got.correct_len != want.correct_len) | (got.bonus != want.bonus)
        differ += int(other.sum())
        # Two float32 evaluations may decide a coin beside its threshold, or a race of two tokens, either way.
        coin = ((coins - want.thresholds[:, 1:]).abs() < _NEAR).any(-1)
        race = (got.correct_len == want.correct_len) & (_lead(given, live, seed, got) < _NEAR)
        wrong += int((other & ~coin & ~race).sum())
        ways = [way(given, NoiseState(seed, plan.device), live) for way in _launches(plan).values()]
        wrong += sum(_differing(bs, ways[0], way) for way in ways[1:])
    decided = _CHECKED * bs
    given, live = _requests(plan, bs, 0), _lengths(plan, bs, 0) if capped else None
    ours, twin = NoiseState(1, plan.device), NoiseState(1, plan.device)
    name = "block_verify, live rows" if capped else "block_verify"
    calls = (
        lambda: block_verify(**given, noise=ours, live=live),
        lambda: block_verify_torch(**given, noise=twin, live=live),
    )
    # Read at least once: every target and draft row for its norm.
    nbytes = 4 * plan.kernel_vocab * bs * (2 * plan.drafts + 1)
    row = _row(plan, name, bs, calls, nbytes, decided, differ, wrong)
    for way, function in _launches(plan).items():
        times = local_times(partial(function, given, ours, live), plan.iterations, plan.graphs, plan.device == "cuda")
        row[f"{way}_p50_us"] = round(statistics.median(times), 3)
    return row


def _launches(plan: VerifyPlan) -> dict[str, Callable[..., tuple[torch.Tensor, ...]]]:
    """The ways to launch block_verify on a GPU: of (arguments, noise, live), and their bytes must be equal."""
    if plan.device != "cuda":
        return {}
    from ..kernels.block_verify_triton import launch, programs_at_once

    def way(programs: int) -> Callable[..., tuple[torch.Tensor, ...]]:
        return lambda given, noise, live: launch(*given.values(), noise, live, None, programs=programs)

    return {"one_launch": way(programs_at_once(torch.device(plan.device))), "four_launches": way(0)}


def _differing(bs: int, one: tuple[torch.Tensor, ...], other: tuple[torch.Tensor, ...]) -> int:
    """Requests of which any byte differs."""
    pairs = zip(one, other, strict=True)
    rows = [(a.view(torch.uint8).view(bs, -1) != b.view(torch.uint8).view(bs, -1)).any(-1) for a, b in pairs]
    return int(torch.stack(rows).any(0).sum())


def _lead(given: dict[str, torch.Tensor], live: torch.Tensor | None, key: int, got: BlockVerdict) -> torch.Tensor:
    """By how much the winner of each request's race for the token after got's accepted drafts leads got's token, in
    float64, as a difference of logarithms: 0 where they are the same."""
    bs, rows = given["candidates"].shape
    target = given["target"].view(bs, rows, -1).double() / given["target_temperatures"].double().view(-1, 1, 1)
    draft = given["draft_logits"].double() / given["draft_temperatures"].double().view(-1, 1, 1)
    _, _, law = block_laws(target.softmax(-1), draft.softmax(-1), given["candidates"][:, 1:], live)
    clock = exponential(NoiseState(key, target.device).state, bs, law.shape[-1], _TOKENS).double()
    score = law[torch.arange(bs, device=law.device), got.correct_len.long()].log() - clock.log()
    return score.amax(-1) - score.gather(-1, got.bonus.view(-1, 1)).squeeze(-1)


def _live(plan: VerifyPlan, bs: int) -> dict[str, Any]:
    gen = torch.Generator(plan.device).manual_seed(bs)
    confidence = torch.rand(bs, plan.drafts, generator=gen, device=plan.device)
    confidence[0, -1] = torch.nan
    thresholds = torch.full((plan.drafts - 1,), 0.3, device=plan.device)
    out, twin = (torch.empty(bs, dtype=torch.int32, device=plan.device) for _ in range(2))
    live_rows(confidence, thresholds, out)
    differ = int((out != live_rows_torch(confidence, thresholds, twin)).sum())
    calls = (
        lambda: live_rows(confidence, thresholds, out),
        lambda: live_rows_torch(confidence, thresholds, twin),
    )
    return _row(plan, "live_rows", bs, calls, 4 * bs * (plan.drafts + 1), bs, differ, differ)


def _copy(plan: VerifyPlan, bs: int) -> dict[str, Any]:
    gen = torch.Generator(plan.device).manual_seed(bs)
    stride = plan.drafts + 1
    rows = bs * stride
    live = _lengths(plan, bs, bs)
    weights = torch.rand(rows, TOP_K, generator=gen, device=plan.device)
    ids = torch.randint(0, EXPERTS, (rows, TOP_K), generator=gen, device=plan.device, dtype=torch.int32)
    packed = torch.randint(0, 1 << 30, (rows, TOP_K), generator=gen, device=plan.device, dtype=torch.int32)
    ours, twin = ([tensor.clone() for tensor in (weights, ids, packed)] for _ in range(2))
    copy_rows(*ours, live, stride)
    copy_rows_torch(*twin, live, stride)
    differ = sum(int((a != b).any(-1).sum()) for a, b in zip(ours, twin, strict=True))
    calls = (lambda: copy_rows(*ours, live, stride), lambda: copy_rows_torch(*twin, live, stride))
    dead = rows - int(live.sum())
    return _row(plan, "copy_rows", bs, calls, dead * TOP_K * 12 * 2, rows, differ, differ)
