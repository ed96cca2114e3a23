"""Which protocol, grid and chunk serve a size: measured numbers, and arithmetic that is the same on every rank."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["Plan", "bulk_plan", "choose", "fits", "small_plan"]


@dataclass(frozen=True)
class Plan:
    """How one call is launched.

    Attributes:
        protocol: "packet", "line" or "bulk" (peer.cu).
        grid, block: CUDA blocks, threads of a block (a multiple of 32).
        chunk: bytes of a bulk chunk, a multiple of 16.
        push: bulk senders write into their peers' arenas; otherwise receivers read from the senders'.
        two_shot: bulk sum in two shots.
        roles: bulk blocks that send, that reduce, that collect; they add up to grid. Packet and line: roles[0] blocks
            that only send, while the rest only receive; 0: every block does both.
    """

    protocol: str
    grid: int
    block: int
    chunk: int = 0
    push: bool = False
    two_shot: bool = False
    roles: tuple[int, int, int] = (0, 0, 0)


def small_plan(protocol: str, nbytes: int, blocks: int = 128, block: int = 512, senders: int = 0) -> Plan:
    """A packet or line plan with about one item per thread, at most `blocks` blocks.

    All blocks must be on the GPU together (a waiting one keeps its place), so `blocks` stays under the number of
    multiprocessors, which hold at least one block of 1024 threads each.
    """
    words = max(1, math.ceil(nbytes / 8))
    threads = words if protocol == "packet" else math.ceil(words / 15) * 8
    block = min(block, max(32, math.ceil(threads / 32) * 32))
    if senders:
        return Plan(protocol, blocks, block, roles=(senders, 0, blocks - senders))
    return Plan(protocol, min(blocks, math.ceil(threads / block)), block)


def bulk_plan(
    op: str,
    world: int,
    nbytes: int,
    chunk: int,
    blocks: int,
    chunks: int,
    *,
    push: bool,
    two_shot: bool = False,
    block: int = 512,
    share: float = 0.5,
) -> Plan:
    """A bulk plan over at most `blocks` blocks, `share` of them senders. `chunk` grows where flags would run out."""
    scatter = two_shot or op == "reduce_scatter"
    part = _round16(math.ceil(nbytes / world) if scatter else nbytes)
    chunk = max(chunk, _round16(math.ceil(part / chunks)))
    count = max(1, math.ceil(part / chunk))
    targets = world - 1
    if op in ("all_reduce", "reduce_scatter"):
        sends = count * (targets if scatter else 1)
        senders = max(1, min(sends, int(blocks * share)))
        rest = blocks - senders
        if two_shot:
            reducers = max(1, min(count, rest // 2))
            roles = (senders, reducers, max(1, min(count * targets, rest - reducers)))
        else:
            roles = (senders, max(1, min(count, rest)), 0)
    else:
        senders = max(1, min(count, int(blocks * share)))
        roles = (senders, 0, max(1, min(count * targets, blocks - senders)))
    return Plan("bulk", sum(roles), block, chunk, push, two_shot, roles)


def fits(plan: Plan, op: str, world: int, nbytes: int, packet: int, line: int, stage: int) -> bool:
    """Whether a call of nbytes (reduce_scatter: of all of x) finds room in areas of these sizes."""
    size = math.ceil(nbytes / world) if op == "reduce_scatter" else nbytes
    if plan.protocol == "packet":
        return size <= packet
    if plan.protocol == "line":
        return size <= line
    # One-shot sums that are pushed need room for every sender's shard, and a sum's stage has room for two.
    one_shot = op == "all_reduce" and plan.push and not plan.two_shot
    return (nbytes * world if one_shot else nbytes) <= (2 * stage if one_shot else stage)


def choose(op: str, world: int, nbytes: int, *, lines: bool, stage: int, chunks: int) -> Plan:
    """The plan for a size. Measured on H200 with NV18 links (benchmarks/results); bytes are those of Route.

    Args:
        lines: whether every link delivers 128-byte stores whole (NVLink); otherwise packets serve in their place.
    """
    size = math.ceil(nbytes / world) if op == "reduce_scatter" else nbytes
    if size <= 8 << 10 or (not lines and size <= 128 << 10):
        return small_plan("packet", size)
    if lines and size <= (512 << 10 if world == 2 or op != "all_reduce" else 256 << 10):
        return small_plan("line", size, block=512)
    two_shot = op == "all_reduce" and world > 2
    return bulk_plan(op, world, nbytes, 16 << 10, 264, chunks, push=False, two_shot=two_shot)


def _round16(n: int) -> int:
    return (n + 15) // 16 * 16
