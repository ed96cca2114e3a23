"""The phases of block_verify_triton.py's kernel: what a program does for one work item, and the laws they share.

1. `row_stats`: maximum and sum of exponentials of a tile of a target or draft row.
2. `excess`: a partial sum of S_i, for a draft whose coin is below w_i.
3. `choose`: every tile decides tau (the same decision from the same words) and races the correction token.
4. `finish`: the winner of the tiles; advances the noise.

No libdevice: the interpreter has no body for it.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["choose", "excess", "finish", "row_stats"]


@triton.jit
def _tile_row(pointer, at, offsets, mask):
    return tl.load(pointer + at + offsets, mask=mask, other=float("-inf")).to(tl.float32)


@triton.jit
def row_stats(
    slot, tile, target, draft, t_temp, d_temp, live, part_max, part_sum,
    target_stride, draft_stride_b, draft_stride_g, vocab, tiles,
    GAMMA: tl.constexpr, HAS_TARGET: tl.constexpr, HAS_DRAFT: tl.constexpr, HAS_LIVE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Slots of the statistics: request b has 2 GAMMA + 1 rows, the target's first."""
    ROWS: tl.constexpr = 2 * GAMMA + 1
    b = slot // ROWS
    row = slot % ROWS
    is_target = row <= GAMMA
    k = tl.where(is_target, row, row - GAMMA - 1)
    wanted = (is_target & HAS_TARGET) | ((row > GAMMA) & HAS_DRAFT)
    if HAS_LIVE:
        wanted = wanted & (k < tl.load(live + b))
    if wanted:
        offsets = tile * TILE + tl.arange(0, TILE)
        mask = offsets < vocab
        if is_target:
            temperature = tl.load(t_temp + b)
            x = _tile_row(target, (b * (GAMMA + 1) + k).to(tl.int64) * target_stride, offsets, mask)
        else:
            temperature = tl.load(d_temp + b)
            x = _tile_row(draft, b.to(tl.int64) * draft_stride_b + k * draft_stride_g, offsets, mask)
        top = tl.max(x, axis=0)
        # A tile of -inf has no maximum to subtract; a NaN must come out as NaN.
        shift = tl.where(top == float("-inf"), 0.0, top)
        total = tl.sum(tl.where(mask, tl.exp((x - shift) / temperature), 0.0), axis=0)
        tl.store(part_max + slot * tiles + tile, top)
        tl.store(part_sum + slot * tiles + tile, total)


@triton.jit
def _norm(part_max, part_sum, slot, temperature, tiles, TILES: tl.constexpr):
    """(maximum, log of the sum of exponentials) of a row, from its tiles."""
    at = tl.arange(0, TILES)
    tops = tl.load(part_max + slot * tiles + at, mask=at < tiles, other=float("-inf"))
    sums = tl.load(part_sum + slot * tiles + at, mask=at < tiles, other=0.0)
    top = tl.max(tops, axis=0)
    scaled = tl.where(tops == float("-inf"), 0.0, sums * tl.exp((tops - top) / temperature))
    return top, tl.log(tl.sum(scaled, axis=0))


@triton.jit
def _weight_step(
    log_w, b, j, candidates, target, draft, t_temp, d_temp, part_max, part_sum,
    target_stride, draft_stride_b, draft_stride_g, tiles,
    GAMMA: tl.constexpr, HAS_TARGET: tl.constexpr, HAS_DRAFT: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """log w_{j+1} from log w_j."""
    x = tl.load(candidates + b * (GAMMA + 1) + j + 1).to(tl.int64)
    slot = b * (2 * GAMMA + 1)
    value = tl.load(target + (b * (GAMMA + 1) + j).to(tl.int64) * target_stride + x).to(tl.float32)
    if HAS_TARGET:
        temperature = tl.load(t_temp + b)
        top, log_sum = _norm(part_max, part_sum, slot + j, temperature, tiles, TILES)
        log_p = (value - top) / temperature - log_sum
    else:
        log_p = tl.where(value >= 0.0, tl.log(value), float("nan"))
    log_q = 0.0
    if HAS_DRAFT:
        temperature = tl.load(d_temp + b)
        value = tl.load(draft + b.to(tl.int64) * draft_stride_b + j * draft_stride_g + x).to(tl.float32)
        top, log_sum = _norm(part_max, part_sum, slot + GAMMA + 1 + j, temperature, tiles, TILES)
        log_q = (value - top) / temperature - log_sum
    # Comparisons with NaN are false: a law that is none accepts nothing. An approximate logarithm may leave a
    # probability of 1 a hair above it; that is 1, not "no probability".
    usable = (log_q > float("-inf")) & (log_q <= 1.0) & (log_p <= 1.0)
    step = log_w + tl.minimum(log_p, 0.0) - tl.minimum(log_q, 0.0)
    return tl.where(usable, tl.minimum(step, 0.0), float("-inf"))


@triton.jit
def _coin(coins, state, b, j, GAMMA: tl.constexpr, HAS_COINS: tl.constexpr):
    if HAS_COINS:
        value = tl.load(coins + b * GAMMA + j)
    else:
        word = _word(tl.full((1,), j, tl.uint32), b, state, 0)
        value = tl.sum((word >> 8).to(tl.float32) * 5.9604644775390625e-08, axis=0)
    return value


@triton.jit
def _word(column, row, state, DOMAIN: tl.constexpr):
    """First word of Philox-4x32-10 at (column, row, step, domain); philox.py has the same in torch."""
    key = tl.load(state)
    step = tl.load(state + 1)
    zero = column * 0
    c1 = zero + row.to(tl.uint32)
    c2 = zero + (step & 0xFFFFFFFF).to(tl.uint32)
    word, _c1, _c2, _c3 = tl.philox(key, column, c1, c2, zero + DOMAIN, 10)
    return word


@triton.jit
def _laws(
    offsets, vocab, b, k, with_draft, candidates, target, draft, t_temp, d_temp, part_max, part_sum,
    target_stride, draft_stride_b, draft_stride_g, tiles,
    GAMMA: tl.constexpr, HAS_TARGET: tl.constexpr, HAS_DRAFT: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """(log p_k, q_k) over a tile. q is 0 where it is no probability, and everywhere without `with_draft`."""
    slot = b * (2 * GAMMA + 1)
    x = _tile_row(target, (b * (GAMMA + 1) + k).to(tl.int64) * target_stride, offsets, offsets < vocab)
    if HAS_TARGET:
        temperature = tl.load(t_temp + b)
        top, log_sum = _norm(part_max, part_sum, slot + k, temperature, tiles, TILES)
        log_p = (x - top) / temperature - log_sum
    else:
        log_p = tl.where(x > 0.0, tl.log(tl.where(x > 0.0, x, 1.0)), float("-inf"))
    if HAS_DRAFT:
        temperature = tl.load(d_temp + b)
        inside = offsets < tl.where(with_draft, vocab, 0)
        x = _tile_row(draft, b.to(tl.int64) * draft_stride_b + k * draft_stride_g, offsets, inside)
        top, log_sum = _norm(
            part_max, part_sum, slot + GAMMA + 1 + tl.where(with_draft, k, 0), temperature, tiles, TILES
        )
        q = tl.exp((x - top) / temperature - log_sum)
        q = tl.where(with_draft & (q <= 2.0), tl.minimum(q, 1.0), 0.0)
    else:
        drafted = tl.load(candidates + b * (GAMMA + 1) + tl.where(with_draft, k + 1, 0))
        q = tl.where(with_draft & (offsets == drafted), 1.0, 0.0)
    return log_p, q


@triton.jit
def excess(
    b, i, tile, candidates, target, draft, t_temp, d_temp, live, coins, state, part_max, part_sum, part_excess,
    target_stride, draft_stride_b, draft_stride_g, vocab, tiles,
    GAMMA: tl.constexpr, HAS_TARGET: tl.constexpr, HAS_DRAFT: tl.constexpr, HAS_LIVE: tl.constexpr,
    HAS_COINS: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    total = 0.0
    needed = True
    if HAS_LIVE:
        needed = i < tl.load(live + b) - 1
    if needed:
        log_w = 0.0
        coin = 0.0
        for j in tl.static_range(GAMMA - 1):
            step = _weight_step(
                log_w, b, j, candidates, target, draft, t_temp, d_temp, part_max, part_sum,
                target_stride, draft_stride_b, draft_stride_g, tiles, GAMMA, HAS_TARGET, HAS_DRAFT, TILES,
            )  # fmt: skip
            log_w = tl.where(j < i, step, log_w)
            coin = tl.where(j < i, _coin(coins, state, b, j, GAMMA, HAS_COINS), coin)
        # h_i <= w_i: a coin that is not below w_i needs no S_i.
        if coin < tl.exp(log_w):
            offsets = tile * TILE + tl.arange(0, TILE)
            mask = offsets < vocab
            log_p, q = _laws(
                offsets, vocab, b, i, True, candidates, target, draft, t_temp, d_temp, part_max, part_sum,
                target_stride, draft_stride_b, draft_stride_g, tiles, GAMMA, HAS_TARGET, HAS_DRAFT, TILES,
            )  # fmt: skip
            above = tl.exp(log_w + log_p) - q
            total = tl.sum(tl.where(mask & (above > 0.0), above, 0.0), axis=0)
    tl.store(part_excess + (b * GAMMA + i) * tiles + tile, total)


@triton.jit
def choose(
    b, tile, candidates, target, draft, t_temp, d_temp, live, coins, state, part_max, part_sum, part_excess,
    lengths, weights, thresholds, best, best_at, target_stride, draft_stride_b, draft_stride_g, vocab, tiles,
    GAMMA: tl.constexpr, HAS_TARGET: tl.constexpr, HAS_DRAFT: tl.constexpr, HAS_LIVE: tl.constexpr,
    HAS_COINS: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    last = GAMMA
    if HAS_LIVE:
        last = tl.load(live + b) - 1
    at = tl.arange(0, TILES)
    log_w = 0.0
    tau = b * 0
    log_w_tau = 0.0
    tl.store(weights + b * (GAMMA + 1), 1.0, mask=tile == 0)
    tl.store(thresholds + b * (GAMMA + 1), 1.0, mask=tile == 0)
    for j in tl.static_range(GAMMA):
        i = j + 1
        log_w = _weight_step(
            log_w, b, j, candidates, target, draft, t_temp, d_temp, part_max, part_sum,
            target_stride, draft_stride_b, draft_stride_g, tiles, GAMMA, HAS_TARGET, HAS_DRAFT, TILES,
        )  # fmt: skip
        w = tl.where(i > last, 0.0, tl.exp(log_w))
        h = w
        if i < GAMMA:
            parts = tl.load(part_excess + (b * GAMMA + i) * tiles + at, mask=at < tiles, other=0.0)
            total = tl.sum(parts, axis=0)
            inner = tl.where(w >= 1.0, 1.0, total / (total + (1.0 - w)))
            h = tl.where(i == last, w, inner)
        h = tl.where(i > last, 0.0, h)
        accepted = _coin(coins, state, b, j, GAMMA, HAS_COINS) < h
        tau = tl.where(accepted, i, tau)
        log_w_tau = tl.where(accepted, log_w, log_w_tau)
        tl.store(weights + b * (GAMMA + 1) + i, w, mask=tile == 0)
        tl.store(thresholds + b * (GAMMA + 1) + i, h, mask=tile == 0)
    tl.store(lengths + b, tau, mask=tile == 0)

    offsets = tile * TILE + tl.arange(0, TILE)
    mask = offsets < vocab
    whole = tau == last
    log_p, q = _laws(
        offsets, vocab, b, tau, tau < last, candidates, target, draft, t_temp, d_temp, part_max, part_sum,
        target_stride, draft_stride_b, draft_stride_g, tiles, GAMMA, HAS_TARGET, HAS_DRAFT, TILES,
    )  # fmt: skip
    law = tl.exp(tl.where(whole, 0.0, log_w_tau) + log_p) - q
    u = (_word(offsets.to(tl.uint32), b, state, 1).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    u = tl.minimum(u, 0.999999940395355224609375)
    series = u * (1.0 + u * (0.5 + u * (0.3333333333333333 + u * 0.25)))
    clock = tl.log(tl.where(u < 0.015625, series, -tl.log(1.0 - u)))
    # The race of the correction law, and that of p_tau for the case that rounding left no correction.
    race = tl.where(mask & (law > 0.0), tl.log(tl.where(law > 0.0, law, 1.0)) - clock, float("-inf"))
    spare = tl.where(mask & (log_p > float("-inf")), log_p - clock, float("-inf"))
    slot = b * tiles + tile
    tl.store(best + slot * 2, tl.max(race, axis=0))
    tl.store(best_at + slot * 2, tile * TILE + tl.argmax(race, axis=0))
    tl.store(best + slot * 2 + 1, tl.max(spare, axis=0))
    tl.store(best_at + slot * 2 + 1, tile * TILE + tl.argmax(spare, axis=0))


@triton.jit
def finish(b, best, best_at, bonus, state, tiles, TILES: tl.constexpr):
    at = tl.arange(0, TILES)
    mask = at < tiles
    slots = (b * tiles + at) * 2
    race = tl.load(best + slots, mask=mask, other=float("-inf"))
    spare = tl.load(best + slots + 1, mask=mask, other=float("-inf"))
    if tl.max(race, axis=0) > float("-inf"):
        token = tl.load(best_at + (b * tiles + tl.argmax(race, axis=0)) * 2)
    else:
        token = tl.load(best_at + (b * tiles + tl.argmax(spare, axis=0)) * 2 + 1)
    tl.store(bonus + b, token.to(tl.int64))
    if b == 0:
        tl.store(state + 1, tl.load(state + 1) + 1)
