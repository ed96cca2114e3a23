"""Which protocol, grid and chunk serve a size: measured numbers, and arithmetic that is the same on every rank."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["Plan", "bulk_plan", "choose", "fits", "small_plan"]

KIB, MIB = 1 << 10, 1 << 20
_SUMS = ("all_reduce", "reduce_scatter")


@dataclass(frozen=True)
class Plan:
    """How one call is launched. Protocol, chunk and shots must be equal on every rank; the grid is each rank's own.

    Attributes:
        protocol: "packet", "line" or "bulk" (peer_core.cuh).
        grid, block: CUDA blocks, threads of a block (a multiple of 32).
        chunk: bytes of a bulk chunk, a multiple of 16.
        two_shot: a sum in two shots: a reduce-scatter, then a gather.
        roles: bulk blocks that send, that reduce, that collect; they add up to grid. Packet and line: roles[0] blocks
            that only send, while the rest only receive; 0: every block does both.
    """

    protocol: str
    grid: int
    block: int
    chunk: int = 0
    two_shot: bool = False
    roles: tuple[int, int, int] = (0, 0, 0)


def small_plan(
    protocol: str, nbytes: int, blocks: int = 128, block: int = 512, senders: int = 0, two_shot: bool = False
) -> Plan:
    """A packet or line plan for `nbytes` to one peer: about one item per thread on at most `blocks` blocks, or, with
    `senders`, on all blocks, so many of them only sending."""
    words = max(1, math.ceil(nbytes / 8))
    threads = words if protocol == "packet" else math.ceil(words / 15) * 8
    if senders:
        return Plan(protocol, blocks, block, 0, two_shot, (senders, 0, blocks - senders))
    block = min(block, max(32, math.ceil(threads / 32) * 32))
    return Plan(protocol, min(blocks, math.ceil(threads / block)), block, 0, two_shot)


def bulk_plan(
    op: str,
    world: int,
    nbytes: int,
    chunk: int,
    blocks: int,
    chunks: int,
    *,
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
    if op in _SUMS:
        senders = max(1, min(count * (targets if scatter else 1), int(blocks * share)))
        rest = blocks - senders
        if two_shot:
            reducers = max(1, min(count, rest // 2))
            roles = (senders, reducers, max(1, min(count * targets, rest - reducers)))
        else:
            roles = (senders, max(1, min(count, rest)), 0)
    else:
        senders = max(1, min(count, int(blocks * share)))
        roles = (senders, 0, max(1, min(count * targets, blocks - senders)))
    return Plan("bulk", sum(roles), block, chunk, two_shot, roles)


def fits(plan: Plan, op: str, world: int, nbytes: int, packet: int, line: int, bulk: int) -> bool:
    """Whether a call of nbytes (Route's count) finds room in areas made for shards of packet, line and bulk bytes."""
    scatter = plan.two_shot or op == "reduce_scatter"
    size = math.ceil(nbytes / world) if scatter else nbytes
    if plan.protocol == "packet":
        return size <= packet
    if plan.protocol == "line":
        # Lines in two shots are a scatter and a gather of equal parts.
        return size <= line and not (plan.two_shot and nbytes % (16 * world))
    if op in _SUMS and not scatter and world > 2:
        return nbytes * world <= bulk
    return nbytes <= bulk


def choose(op: str, world: int, nbytes: int, *, lines: bool, chunks: int, threads: int = 132 * 1024) -> Plan:
    """The plan for a size (Route's count of bytes).

    Worlds 2 and 4 as measured on H200 with NV18 links (benchmarks/peer_tune.py); other worlds take the numbers of 4.
    A table by `comm.calibrate` decides where the transport is used at all.

    Args:
        lines: whether every link delivers 128-byte stores whole (NVLink); otherwise packets and bulk serve alone.
        threads: how many threads of these kernels this GPU holds at once. Blocks of a packet or line plan wait for
            others' and keep their places, so a larger grid would never end. Only the grid depends on it.
    """
    far = nbytes * (world - 1) > 1536 * KIB or (not lines and nbytes > 128 * KIB)
    two_shot = op == "all_reduce" and world > 2 and far
    size = math.ceil(nbytes / world) if two_shot or op == "reduce_scatter" else nbytes

    def small(protocol: str, blocks: int, block: int, senders: float = 0.0) -> Plan:
        blocks = max(2, min(blocks, threads // block))
        return small_plan(protocol, size, blocks, block, int(blocks * senders), two_shot)

    if not two_shot and (size <= 32 * KIB or (not lines and size <= 128 * KIB)):
        return small("packet", 128, 256)
    whole = not (two_shot and nbytes % (16 * world))
    if world > 2 and (nbytes > 1536 * KIB if two_shot else size > 8 * MIB):
        return _far_bulk(op, world, nbytes, chunks, threads, two_shot)
    if lines and whole and size <= 8 * MIB:
        if size <= 128 * KIB:
            return small("line", 128, 256)
        if size <= 768 * KIB:
            return small("line", 128, 512)
        return small("line", 256, 256, 0.25) if size <= 2560 * KIB else small("line", 256, 512, 0.4)
    return bulk_plan(op, world, nbytes, 16 * KIB, min(256, threads // 256), chunks, two_shot=two_shot, block=256)


def _far_bulk(op: str, world: int, nbytes: int, chunks: int, threads: int, two_shot: bool) -> Plan:
    """The bulk plan of a large call between more than two ranks, where most blocks have several peers to serve."""

    def plan(chunk: int, blocks: int, block: int, share: float) -> Plan:
        blocks = min(blocks, threads // block)
        return bulk_plan(op, world, nbytes, chunk, blocks, chunks, two_shot=two_shot, block=block, share=share)

    if two_shot:
        if nbytes <= 12 * MIB:
            return plan(max(8 * KIB, _round16(nbytes // world // 64)), 528, 256, 0.5)
        return plan(16 * KIB, 528, 256, 0.65) if nbytes <= 32 * MIB else plan(64 * KIB, 264, 512, 0.5)
    if op in _SUMS:
        return plan(64 * KIB, 132, 1024, 0.5)
    return plan(32 * KIB, 256, 256, 0.35) if nbytes <= 32 * MIB else plan(64 * KIB, 132, 1024, 0.35)


def _round16(n: int) -> int:
    return (n + 15) // 16 * 16
