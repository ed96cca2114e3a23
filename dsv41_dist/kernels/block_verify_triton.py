"""The kernel of block_verify.py: four phases (block_verify_phases.py) over requests, rows and tiles of the vocabulary.

A step is a launch for each phase. On a GPU it can be one launch of the same code (_ONE_LAUNCH): a cooperative grid
whose programs take turns at a phase's work items and meet in a barrier before the next phase. Nothing is read on the
host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from .block_verify_phases import choose, excess, finish, row_stats

if TYPE_CHECKING:
    from .block_verify import NoiseState

__all__ = ["launch", "programs_at_once"]

_TILE = 4096
# What `launch` does on a GPU unless it is told: one launch a step, or one for each phase.
_ONE_LAUNCH = False
# Programs of one launch that each SM holds. Their registers are capped so that this many fit.
_PROGRAMS_PER_SM = 2
_REGISTERS_PER_SM = 65536  # every NVIDIA GPU from sm_60 on


@triton.jit
def _meet(arrivals):
    """Wait until every program of the grid is here, and see what they stored before.

    `arrivals` counts barriers in its high half: one barrier adds 2^32 in all, whatever the grid, so that the count
    needs no reset, not after a replay nor before a graph with another grid. The wait has no bound, because a
    cooperative launch is all or nothing: the driver starts every program that is waited for, or refuses the launch.
    """
    programs = tl.num_programs(0)
    mine = tl.where(tl.program_id(0) == 0, 4294967297 - programs.to(tl.int64), 1)
    tl.debug_barrier()  # All threads' stores come before the arrival, and their loads after the wait.
    seen = tl.atomic_add(arrivals, mine, sem="acq_rel", scope="gpu")
    now = seen + mine
    while (now >> 32) == (seen >> 32):
        now = tl.atomic_add(arrivals, tl.full((), 0, tl.int64), sem="acquire", scope="gpu")
    tl.debug_barrier()


@triton.jit(do_not_specialize=["bs"])
def _verify(
    candidates, target, draft, t_temp, d_temp, live, coins, state, arrivals, part_max, part_sum, part_excess,
    lengths, bonus, weights, thresholds, best, best_at, bs, target_stride, draft_stride_b, draft_stride_g, vocab, tiles,
    GAMMA: tl.constexpr, HAS_TARGET: tl.constexpr, HAS_DRAFT: tl.constexpr, HAS_LIVE: tl.constexpr,
    HAS_COINS: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, PHASE: tl.constexpr,
):  # fmt: skip
    """PHASE 1 to 4: that phase alone. 0: all of them, in a cooperative launch."""
    first = tl.program_id(0)
    programs = tl.num_programs(0)
    if PHASE == 0 or PHASE == 1:
        for item in range(first, bs * (2 * GAMMA + 1) * tiles, programs):
            row_stats(
                item // tiles, item % tiles, target, draft, t_temp, d_temp, live, part_max, part_sum,
                target_stride, draft_stride_b, draft_stride_g, vocab, tiles, GAMMA, HAS_TARGET, HAS_DRAFT, HAS_LIVE,
                TILE,
            )  # fmt: skip
    if GAMMA > 1:
        if PHASE == 0:
            _meet(arrivals)
        if PHASE == 0 or PHASE == 2:
            for item in range(first, bs * (GAMMA - 1) * tiles, programs):
                row = item // tiles
                excess(
                    row // (GAMMA - 1), row % (GAMMA - 1) + 1, item % tiles, candidates, target, draft, t_temp, d_temp,
                    live, coins, state, part_max, part_sum, part_excess, target_stride, draft_stride_b, draft_stride_g,
                    vocab, tiles, GAMMA, HAS_TARGET, HAS_DRAFT, HAS_LIVE, HAS_COINS, TILE, TILES,
                )  # fmt: skip
    if PHASE == 0:
        _meet(arrivals)
    if PHASE == 0 or PHASE == 3:
        for item in range(first, bs * tiles, programs):
            choose(
                item // tiles, item % tiles, candidates, target, draft, t_temp, d_temp, live, coins, state, part_max,
                part_sum, part_excess, lengths, weights, thresholds, best, best_at, target_stride, draft_stride_b,
                draft_stride_g, vocab, tiles, GAMMA, HAS_TARGET, HAS_DRAFT, HAS_LIVE, HAS_COINS, TILE, TILES,
            )  # fmt: skip
    if PHASE == 0:
        _meet(arrivals)
    if PHASE == 0 or PHASE == 4:
        for b in range(first, bs, programs):
            finish(b, best, best_at, bonus, state, tiles, TILES)


def programs_at_once(device: torch.device) -> int:
    """Programs that `device` surely holds at once; 0 where there is no cooperative launch (a CPU, the interpreter)."""
    if device.type != "cuda" or not isinstance(_verify, triton.JITFunction):
        return 0
    return torch.cuda.get_device_properties(device).multi_processor_count * _PROGRAMS_PER_SM


def _registers(warps: int) -> int:
    """A thread's registers at most, so that _PROGRAMS_PER_SM programs of `warps` fit on an SM."""
    return min(255, _REGISTERS_PER_SM // (32 * warps * _PROGRAMS_PER_SM))


def launch(
    candidates: torch.Tensor,
    target: torch.Tensor,
    draft: torch.Tensor | None,
    target_temperatures: torch.Tensor | None,
    draft_temperatures: torch.Tensor,
    noise: NoiseState,
    live: torch.Tensor | None,
    coins: torch.Tensor | None,
    tile: int = _TILE,
    programs: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See block_verify.block_verify for the arguments; returns the fields of BlockVerdict.

    `programs`: of the one launch, at most `programs_at_once` to be sure (those that do not fit are refused by the
    driver: RuntimeError); 0: a launch for each phase. The bytes are the same. None: as _ONE_LAUNCH says.
    """
    bs, rows = candidates.shape
    gamma, vocab = rows - 1, target.shape[1]
    device = target.device
    tile = min(tile, triton.next_power_of_2(vocab))
    tiles = triton.cdiv(vocab, tile)
    floats = torch.empty(bs * ((2 * gamma + 1) * 2 + gamma + 2) * tiles, dtype=torch.float32, device=device)
    sizes = [bs * (2 * gamma + 1) * tiles] * 2 + [bs * gamma * tiles, bs * 2 * tiles]
    part_max, part_sum, part_excess, best = floats.split(sizes)
    best_at = torch.empty(bs * 2 * tiles, dtype=torch.int32, device=device)
    lengths = torch.empty(bs, dtype=torch.int32, device=device)
    bonus = torch.empty(bs, dtype=torch.int64, device=device)
    weights = torch.empty(bs, rows, dtype=torch.float32, device=device)
    thresholds = torch.empty_like(weights)
    # The kernel reads them densely. A pointer that a constexpr switches off still needs a tensor to point at.
    d_temp = draft_temperatures.contiguous()
    t_temp = d_temp if target_temperatures is None else target_temperatures.contiguous()
    logits = target if draft is None else draft
    strides = (target.stride(0), 0, 0) if draft is None else (target.stride(0), draft.stride(0), draft.stride(1))
    flags: dict[str, Any] = {
        "GAMMA": gamma,
        "HAS_TARGET": target_temperatures is not None,
        "HAS_DRAFT": draft is not None,
        "HAS_LIVE": live is not None,
        "HAS_COINS": coins is not None,
        "TILE": tile,
        "TILES": triton.next_power_of_2(tiles),
        "num_warps": 8 if tile >= 2048 else 4,
    }
    live = lengths if live is None else live.contiguous()
    coins = weights if coins is None else coins.contiguous()
    args = (
        candidates, target, logits, t_temp, d_temp, live, coins, noise.state, noise.arrivals, part_max, part_sum,
        part_excess, lengths, bonus, weights, thresholds, best, best_at, bs, *strides, vocab, tiles,
    )  # fmt: skip
    items = (bs * (2 * gamma + 1) * tiles, bs * (gamma - 1) * tiles, bs * tiles, bs)
    if programs is None:
        programs = programs_at_once(device) if _ONE_LAUNCH else 0
    if programs:
        flags |= {"launch_cooperative_grid": True, "maxnreg": _registers(flags["num_warps"])}
        _verify[(min(programs, max(items)),)](*args, **flags, PHASE=0)
        return lengths, bonus, weights, thresholds
    for phase, count in enumerate(items, 1):
        if count:
            _verify[(count,)](*args, **flags, PHASE=phase)
    return lengths, bonus, weights, thresholds
