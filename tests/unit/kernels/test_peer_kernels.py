"""The kernels themselves, on a CPU, in random orders of all threads of all ranks: bits, slots, bounds, poison."""

import ctypes
import random
import re
import signal
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv41_dist.comm import reference
from dsv41_dist.kernels.peer import Args, Columns, Layout, barrier, copy_columns, source, sum_parts
from dsv41_dist.kernels.peer_plan import bulk_plan, choose, fits, small_plan

from .peer_host import Host, margins_are_whole, misaligned

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
SMALL = {"packet_bytes": 8192, "line_bytes": 8192, "bulk_bytes": 32768, "chunks": 64}


def layout(world):
    return Layout(world, **SMALL)


def same_bytes(a, b):
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def draw_plan(host, rng, op, nbytes):
    world, protocol = host.world, rng.choice(host.protocols)
    if protocol != "bulk":
        if op == "all_reduce" and protocol == "line" and nbytes % (16 * world) == 0:
            return small_plan(protocol, nbytes, blocks=2, block=64, two_shot=True)
        return small_plan(protocol, nbytes, blocks=2, block=64, senders=rng.randrange(2))
    two_shot = op == "all_reduce" and rng.random() < 0.5
    chunk = rng.choice([64, 256, 1024])
    return bulk_plan(op, world, nbytes, chunk, 6, SMALL["chunks"], two_shot=two_shot, block=64)


def queue_sum(host, rng, scatter):
    world, dtype = host.world, rng.choice(DTYPES)
    n = rng.randrange(1, 900) * (world if scatter else 1)
    if rng.random() < 0.3:
        n = 16 * world * rng.randrange(1, 8)
    n = n if n * dtype.itemsize <= 4096 else 4096 // dtype.itemsize // world * world
    xs = [misaligned(torch.randn(n).to(dtype), dtype.itemsize * rng.randrange(8)) for _ in range(world)]
    for x in xs:
        x[: n // 3] = -0.0  # a sum that begins at +0.0 loses the sign
    want = [reference.reduce_scatter(xs, r) if scatter else reference.all_reduce(xs) for r in range(world)]
    outs = [misaligned(torch.full_like(w, 7), dtype.itemsize * rng.randrange(8)) for w in want]
    if not scatter and rng.random() < 0.4:
        outs = xs
    plan = draw_plan(host, rng, "reduce_scatter" if scatter else "all_reduce", n * dtype.itemsize)
    want = [w.clone() for w in want]
    for rank, group in enumerate(host.groups):
        sum_parts(group, xs[rank], outs[rank], plan, 60.0, scatter=scatter)
    return plan, want, outs, xs


def queue_copy(host, rng):
    world, item = host.world, rng.choice([1, 2, 4, 8])
    rows, src = rng.choice([1, 3, 5]), rng.randrange(world)
    kind = rng.choice(["equal", "uneven", "broadcast"])
    widths = [rng.randrange(0, 100) * item for _ in range(world)]
    if kind == "equal":
        widths = [max(widths)] * world
    elif kind == "broadcast":
        rows, widths = 1, [rng.randrange(1, 4000) if rank == src else 0 for rank in range(world)]
    starts = [sum(widths[:rank]) for rank in range(world)]
    columns = Columns(rows, tuple(widths), tuple(starts), sum(widths))
    by = [(item if kind != "broadcast" else 1) * rng.randrange(8) for _ in range(2 * world)]
    xs = [misaligned(torch.randint(0, 256, (rows, w), dtype=torch.uint8), by[r]) for r, w in enumerate(widths)]
    want = [torch.cat(xs, 1)] * world
    outs = [misaligned(torch.full_like(w, 7), by[world + r]) for r, w in enumerate(want)]
    plan = draw_plan(host, rng, "all_gather", columns.largest)
    for rank, group in enumerate(host.groups):
        copy_columns(group, xs[rank], outs[rank], columns, plan, 60.0)
    return plan, want, outs, xs


def queue_barrier(host, rng):
    for group in host.groups:
        barrier(group, 60.0)
    return None, [], [], []


def run_mixed(host, seed, calls=8):
    """A few calls of all kinds, queued on all ranks, then run in an order drawn from the seed."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    jobs = []
    for _ in range(calls):
        draw = rng.randrange(5)
        jobs.append(
            queue_sum(host, rng, draw == 1)
            if draw < 2
            else queue_copy(host, rng)
            if draw < 4
            else queue_barrier(host, rng)
        )
    ended = host.run(seed)
    right = all(same_bytes(w, o) for _, want, outs, _ in jobs for w, o in zip(want, outs, strict=True))
    return ended, right and all(margins_are_whole(one) for _, _, outs, xs in jobs for one in (*outs, *xs))


def run_broadcasts(host, seed, calls):
    """Only ranks 0 and 1 ever send data, so that nothing but the empty shards tells them how far the others are."""
    torch.manual_seed(seed)
    jobs = []
    for call in range(calls):
        columns = Columns.only(256, call // 4 % 2, host.world)
        data = torch.randint(0, 256, (256,), dtype=torch.uint8)
        outs = [data.clone() if rank == call // 4 % 2 else torch.zeros_like(data) for rank in range(host.world)]
        for rank, group in enumerate(host.groups):
            copy_columns(group, outs[rank], outs[rank], columns, small_plan("packet", 256, blocks=1, block=32), 0.5)
        jobs.append((data, outs))
    ended = host.run(seed)
    return ended, all(torch.equal(data, out) for data, outs in jobs for out in outs)


def test_a_source_does_not_run_ahead_of_slow_receivers():
    for seed in range(10):
        assert run_broadcasts(Host(layout(4)), seed, 12) == (True, True)


@pytest.mark.parametrize("world", [2, 3, 4, 5, 8])
def test_mixed_calls_have_the_bits_of_the_reference(world):
    host = Host(layout(world))
    for seed in range(12 if world < 8 else 4):
        assert run_mixed(host, seed) == (True, True), f"world {world}, seed {seed}"
    assert all(device.reports() == [0] * 8 for device in host.devices)


@given(seed=st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_any_order_of_four_ranks(seed):
    assert run_mixed(Host(layout(4)), seed, calls=5) == (True, True)


@pytest.mark.parametrize("first", [2**32 - 4, 2**31 - 4, 2**63])
def test_the_sequence_passes_a_power_of_two(first):
    host = Host(layout(3), first=first)
    for seed in range(4):
        assert run_mixed(host, seed) == (True, True)
    counts = [[host.sequence(rank, kind) - first for kind in range(3)] for rank in range(3)]
    assert counts[0] == counts[1] == counts[2]
    assert sum(counts[0]) == 32


def test_a_fresh_arena_is_not_misled_by_what_an_earlier_one_left():
    """Why allocate() zeroes the arena: left as it was, flags of the earlier group pass for this one's."""
    layout_ = layout(2)
    host = Host(layout_)
    for seed in range(6):
        assert run_mixed(host, seed) == (True, True)
    for arena in host.arenas:  # the same memory, a new group: sequences begin again
        for kind in range(3):
            at = layout_.control(kind)
            arena[at : at + 8] = 0
    misled = [run_mixed(host, seed) for seed in range(6)]
    assert (True, False) in misled
    for arena in host.arenas:
        arena[:] = 0
    for seed in range(6):
        assert run_mixed(host, seed) == (True, True)


FAULTS = {
    "one slot": ("(seq & 1) * WORLD", "0 * WORLD"),
    "one stage slot": ("(seq & 1) * a.stage_slot[shot]", "0"),
    "one flag slot": ("(seq & 1) * a.flag_slot", "0"),
    "flag before payload": (
        "  block_sync();\n  if (threadIdx.x < WORLD && ((to >>",
        "  if (threadIdx.x < WORLD && ((to >>",
    ),
    "in place, lines": ("const bool to_self = a.blocks[0] != 0;", "const bool to_self = false;"),
    "no wait": ("if (!P::any(missing != 0)) return true;", "return true;"),
    "sum from zero": ("acc.set(get(0));", "acc.set(0); acc.add(get(0));"),
    "rotated order": ("acc.add(get(s));", "acc.add(get(WORLD - s));"),
    "in place": ("parts ? others : everyone)) return;", "others)) return;"),
    "a last part that ends with the others": ("low(a.part, a.bytes - part_at(p))", "a.part"),
    "a part that begins behind the end": ("low(p * a.part, a.bytes)", "(p * a.part)"),
    "no packet where nothing is sent": ("return bytes ? (bytes + 7) / 8 : 1;", "return (bytes + 7) / 8;"),
}


BULK = ("one stage slot", "one flag slot", "flag before payload", "in place")
BULK += ("a last part that ends with the others", "a part that begins behind the end")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault):
    """The checks above can fail: each of these one-line faults in the source is seen within some seeds."""
    for seed in range(40):
        host = Host(layout(4), edit=FAULTS[fault])
        if fault in BULK:
            host.protocols = ["bulk"]
        run = run_broadcasts if fault == "no packet where nothing is sent" else run_mixed
        if run(host, seed, calls=12) != (True, True):
            return
    pytest.fail(f"planted fault {fault!r} was not seen")


def run_missing(host, protocol, op):
    """Two calls of ranks 0 and 2 that rank 1 does not make; then one of all. What is wrong, in words; [] if nothing."""
    plan = small_plan(protocol, 2400, blocks=2, block=64)
    if protocol == "bulk":
        plan = bulk_plan(op, 3, 2400, 256, 6, 64, block=64)
    xs = [torch.ones(600) for _ in range(3)]
    outs = [torch.full(({"all_reduce": 600, "reduce_scatter": 200, "all_gather": 1800}[op],), 7.0) for _ in range(3)]
    columns = Columns.equal((600,), 0, 4, 3)

    def call(rank, timeout_s):
        if op == "all_gather":
            copy_columns(host.groups[rank], xs[rank], outs[rank], columns, plan, timeout_s)
        else:
            sum_parts(host.groups[rank], xs[rank], outs[rank], plan, timeout_s, scatter=op == "reduce_scatter")

    wrong = []
    for rank in (0, 2):
        call(rank, 0.05)
        barrier(host.groups[rank], 0.05)  # the rest of a replay
    assert host.run(seed=3, steps=0)
    for rank in (0, 2):
        record = host.devices[rank].record_bytes
        reports = host.devices[rank].reports()
        if not any(reports) or any(word not in (0, 0x80000002) for word in reports):  # rank 1 alone is missing
            wrong.append(f"rank {rank} reports {[hex(word) for word in reports]}")
        kind, sequence = int(record[32:36].view("uint32")[0]) - 1, int(record[40:48].view("uint64")[0])
        if (kind, sequence) != (int(op != "all_gather"), 1):
            wrong.append(f"rank {rank} says that call {sequence} of kind {kind} failed")
    # Rank 1 comes late: it learns of it, sends nothing, ends at once. So do later calls of the others.
    before = [arena[1024:].copy() for arena in host.arenas]
    for rank in range(3):
        outs[rank].fill_(7.0)
        call(rank, 60.0)
    if not host.run(seed=4, steps=300_000):
        return [*wrong, "the call of all does not end"]
    if not any(host.devices[1].reports()):
        wrong.append("rank 1 does not learn of it")
    if any((arena[1024:] != was).any() for arena, was in zip(host.arenas, before, strict=True)):
        wrong.append("something was sent")
    if op != "all_gather" and not all((out == 7.0).all() for out in outs):
        wrong.append("a sum was written")
    return wrong


@pytest.mark.parametrize("protocol", ["packet", "line", "bulk"])
@pytest.mark.parametrize("op", ["all_reduce", "reduce_scatter", "all_gather"])
def test_a_missing_rank_is_reported_by_all_and_final(protocol, op):
    assert run_missing(Host(layout(3)), protocol, op) == []


AFTER_FAILURE = {
    "small copies go on": ("    if (P::any(run.dead)) break;\n    uint4 v = P::pack", "    uint4 v = P::pack"),
    "small sums go on": ("        if (P::any(run.dead)) break;\n", ""),
    "bulk copies go on": (
        "  if (run.dead) return;\n  const u32 everyone = (1u << WORLD) - 1, me = a.rank;\n",
        "  const u32 everyone = (1u << WORLD) - 1, me = a.rank;\n",
    ),
    "bulk sums go on": (
        "  if (run.dead) return;\n  const u32 everyone = (1u << WORLD) - 1, me = a.rank, others",
        "  const u32 everyone = (1u << WORLD) - 1, me = a.rank, others",
    ),
    "the last call is named": ("if (!ld_word(a.host + 32)) {", "{"),
    "the late rank is not told": ("if (run.dead && blockIdx.x == 0 && threadIdx.x == 0) tell_host(a, run.seq);", ""),
}


@pytest.mark.parametrize("fault", AFTER_FAILURE)
def test_a_planted_fault_after_a_failure_is_found(fault):
    for protocol in ("packet", "line", "bulk"):
        for op in ("all_reduce", "all_gather"):
            if run_missing(Host(layout(3), edit=AFTER_FAILURE[fault]), protocol, op):
                return
    pytest.fail(f"planted fault {fault!r} was not seen")


def test_an_access_wider_than_the_address_allows_is_found():
    """A GPU faults on it; here the compiler's check ends the process."""
    code = (
        "from dsv41_dist.kernels import peer; from tests.unit.kernels import test_peer_kernels as tests;"
        "peer._unit = {}; print(tests.run_mixed(tests.Host(tests.layout(3)), 1))"
    )
    ends = {}
    for unit in ("peer._unit", "lambda bits: 16"):
        command = [sys.executable, "-c", code.format(unit)]
        ends[unit] = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=120, check=False)
    assert ends["peer._unit"].stdout == "(True, True)\n"
    assert ends["lambda bits: 16"].returncode in (-signal.SIGILL, -signal.SIGTRAP)


def test_args_has_the_fields_of_the_source_in_their_order():
    body = re.search(r"struct Args \{(.*?)\n\};", source(), re.S).group(1)
    body = re.sub(r"//[^\n]*", "", body)
    names = [name for line in re.findall(r"u(?:64|32) ([^;]*);", body) for name in re.findall(r"([a-z_]+)", line)]
    assert names == [name for name, _ in Args._fields_]
    assert ctypes.sizeof(Args) == Host(layout(2)).library.args_bytes()


def test_areas_do_not_overlap():
    for world in (2, 5, 8):
        areas = []
        lay = layout(world)
        for kind in (0, 1):
            areas.append((lay.packets(kind), 2 * world * lay.packet_source))
            areas.append((lay.lines(kind), 2 * world * lay.line_source))
            for shot in range(kind + 1):
                areas.append((lay.stage(kind, shot), 2 * lay.stage_slot(kind, shot)))
                areas.append((lay.flags(kind, shot), 2 * lay.flag_slot))
        areas.append((lay.packets(2), 2 * world * 128))
        areas.sort()
        assert areas[0][0] >= 1024
        assert all(start % 128 == 0 for start, _ in areas)
        for (start, size), (after, _) in zip(areas, [*areas[1:], (lay.nbytes, 0)], strict=True):
            assert start + size <= after


@given(
    world=st.integers(2, 8),
    nbytes=st.integers(1, 64 << 20),
    op=st.sampled_from(["all_reduce", "all_gather", "all_gather_columns", "reduce_scatter", "broadcast"]),
    lines=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_every_chosen_plan_fits_its_areas_and_its_flags(world, nbytes, op, lines):
    lay = Layout(world)
    nbytes = nbytes // world * world or world
    plan = choose(op, world, nbytes, lines=lines, chunks=lay.chunks)
    assert fits(plan, op, world, nbytes, lay.packet_bytes, lay.line_bytes, lay.bulk_bytes)
    assert plan.block % 32 == 0
    assert 1 <= plan.grid * plan.block <= 132 * 2048
    assert plan.protocol != "line" or lines
    if plan.protocol == "bulk":
        part = -(-nbytes // world) if plan.two_shot or op == "reduce_scatter" else nbytes
        assert plan.chunk % 16 == 0
        assert -(-(part + 15 & ~15) // plan.chunk) <= lay.chunks
        assert sum(plan.roles) == plan.grid
        assert plan.roles[0] >= 1
        assert plan.roles[1] >= 1 or op not in ("all_reduce", "reduce_scatter")
        assert plan.roles[2] >= 1 or (op in ("all_reduce", "reduce_scatter") and not plan.two_shot)


@pytest.mark.parametrize("name", ["packet_bytes", "line_bytes", "bulk_bytes"])
def test_a_layout_out_of_bounds_is_refused(name):
    with pytest.raises(ValueError, match=f"{name}=1: allowed is 64 bytes to 1 GiB"):
        Layout(2, **{name: 1})
    with pytest.raises(ValueError, match="world=9: allowed is 2 to 8 ranks"):
        Layout(9)
