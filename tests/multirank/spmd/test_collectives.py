"""Every operation byte by byte against reference.py: every dtype torch has, uneven, empty and non-contiguous."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsv41_dist.comm import (
    REDUCE_OPS,
    SUM_DTYPES,
    ArgumentError,
    LayoutError,
    RowSplit,
    Split,
    TileSplit,
    reference,
)
from dsv41_dist.comm.patterns import byte_pattern, reduce_expected, reduce_pattern, wrong_elements

COPY_DTYPES = [
    *SUM_DTYPES,
    torch.int16,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
    torch.complex32,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]
SHAPES = [(1,), (6, 5), (3, 1, 7), (0, 4), (2, 0, 3)]


def everyone(comm, shape, dtype):
    return [byte_pattern(shape, dtype, 11, rank) for rank in range(comm.ranks.size)]


def gathered(parts, dim):
    """reference.all_gather, byte-wise: torch.cat lacks some of the dtypes."""
    item = parts[0].element_size()
    dense = [p.contiguous().view(torch.uint8).view(*p.shape, item) if p.numel() else p for p in parts]
    if not parts[0].numel():
        shape = list(parts[0].shape)
        shape[dim] *= len(parts)
        return torch.empty(shape, dtype=parts[0].dtype)
    out = reference.all_gather(dense, dim if dim >= 0 else dim - 1)
    return out.view(parts[0].dtype).view(*out.shape[:-1])


@pytest.mark.parametrize("dtype", COPY_DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_all_gather_is_a_byte_copy(comm, shape, dtype):
    parts = everyone(comm, shape, dtype)
    for dim in {0, -1, len(shape) - 1}:
        got = comm.all_gather(parts[comm.ranks.rank], dim, label="gather")
        assert wrong_elements(got, gathered(parts, dim)) == 0


def test_all_gather_in_a_middle_dimension_and_into_out(comm):
    parts = everyone(comm, (2, 3, 4), torch.bfloat16)
    out = torch.empty(2, 3 * comm.ranks.size, 4, dtype=torch.bfloat16)
    got = comm.all_gather(parts[comm.ranks.rank], 1, out=out, label="gather")
    assert got is out
    assert wrong_elements(out, gathered(parts, 1)) == 0


@pytest.mark.parametrize("make", [lambda x: x.t(), lambda x: x[::2], lambda x: x[:, 1:3], lambda x: x.flip(0)], ids=str)
def test_non_contiguous_inputs_and_outputs(comm, make):
    parts = [make(byte_pattern((6, 6), torch.float32, 5, rank)) for rank in range(comm.ranks.size)]
    mine = parts[comm.ranks.rank]
    assert wrong_elements(comm.all_gather(mine, 0, label="gather"), gathered(parts, 0)) == 0
    wide = torch.empty(mine.shape[0] * comm.ranks.size, mine.shape[1] * 2)[:, ::2]
    comm.all_gather(mine, 0, out=wide, label="gather")
    assert wrong_elements(wide, gathered(parts, 0)) == 0
    whole = [make(reduce_pattern((6, 6), torch.float32, 5, rank)) for rank in range(comm.ranks.size)]
    expected = make(reduce_expected((6, 6), torch.float32, 5, comm.ranks.size))
    assert wrong_elements(comm.all_reduce(whole[comm.ranks.rank], label="sum"), expected.contiguous()) == 0
    square = torch.empty(expected.shape[0], expected.shape[1] * 2)[:, ::2]
    comm.all_reduce(whole[comm.ranks.rank], out=square, label="sum")
    assert wrong_elements(square, expected) == 0


def test_lazy_conjugation_is_resolved(comm):
    x = torch.complex(torch.ones(3), torch.full((3,), float(comm.ranks.rank)))
    got = comm.all_gather(x.conj(), label="conj")
    assert got.imag.view(comm.ranks.size, 3)[:, 0].tolist() == [-float(r) for r in range(comm.ranks.size)]


@pytest.mark.parametrize("dtype", COPY_DTYPES, ids=str)
def test_broadcast_from_every_rank(comm, dtype):
    parts = everyone(comm, (5, 3), dtype)
    for src in range(comm.ranks.size):
        x = parts[comm.ranks.rank].clone()
        assert wrong_elements(comm.broadcast(x, src, label="broadcast"), parts[src]) == 0
    x = torch.stack([parts[comm.ranks.rank].view(torch.uint8)] * 2, dim=-1)[..., 0]
    comm.broadcast(x, 0, label="broadcast")
    assert torch.equal(x, parts[0].view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.bool, torch.int64])
@pytest.mark.parametrize("rows", [(6,), (96,), (0,), (2, 3), ()], ids=str)
def test_column_gather_equals_pad_gather_cat(comm, dtype, rows):
    world = comm.ranks.size
    split = TileSplit(14 * 16, 16, world)
    parts = [byte_pattern((*rows, split.size(r)), dtype, 2, r) for r in range(world)]
    got = comm.all_gather_columns(parts[comm.ranks.rank], split, label="columns")
    # pad to the widest, gather, cut, cat: by the plain gather of this communicator.
    mine = parts[comm.ranks.rank]
    padded = torch.zeros((*rows, split.widest), dtype=torch.uint8).view(torch.uint8)
    padded = torch.zeros((*rows, split.widest * mine.element_size()), dtype=torch.uint8)
    if mine.numel():
        flat = mine.contiguous().view(torch.uint8).view(*rows, -1)
        padded[..., : flat.shape[-1]] = flat
    stack = comm.all_gather(padded.unsqueeze(0), 0, label="padded")
    cut = [stack[r, ..., : split.size(r) * mine.element_size()] for r in range(world)]
    expected = torch.cat(cut, dim=-1).contiguous().view(dtype).view(*rows, split.n)
    assert wrong_elements(got, expected) == 0
    if mine.numel():
        assert wrong_elements(got, gathered_columns(parts)) == 0


def gathered_columns(parts):
    return torch.cat([p.contiguous().view(torch.uint8) for p in parts], dim=-1).view(parts[0].dtype)


def test_column_gather_of_windows_and_views(comm):
    world, rank = comm.ranks.size, comm.ranks.rank
    split = TileSplit(1792, 128, world)
    whole = byte_pattern((6, 1792), torch.bfloat16, 1, 0)
    first, offset = split.window(rank)
    window = whole[:, first : first + split.widest]
    mine = window[:, offset : offset + split.size(rank)]
    assert wrong_elements(comm.all_gather_columns(mine, split, label="columns"), whole) == 0


@given(rows=st.integers(0, 9), width=st.integers(1, 5), sizes=st.lists(st.integers(0, 4), min_size=5, max_size=5))
def test_gather_of_a_scatter_is_the_identity(comm, rows, width, sizes):
    sizes = sizes[: comm.ranks.size]
    rank = comm.ranks.rank
    rows_split = Split(sum(sizes), tuple(sizes))
    whole = byte_pattern((rows_split.n, width), torch.float16, rows, 0)
    mine = whole[rows_split.start(rank) : rows_split.start(rank) + sizes[rank]]
    assert wrong_elements(comm.all_gather_rows(mine, rows_split, label="rows"), whole) == 0
    table = byte_pattern((rows, rows_split.n), torch.float16, width, 0)
    part = table[:, rows_split.start(rank) : rows_split.start(rank) + sizes[rank]]
    assert wrong_elements(comm.all_gather_columns(part, rows_split, label="columns"), table) == 0
    uneven = RowSplit.uneven(rows, comm.ranks.size)
    some = table[uneven.start(rank) : uneven.start(rank) + uneven.size(rank)]
    assert wrong_elements(comm.all_gather_rows(some, uneven, label="rows"), table) == 0


@pytest.mark.parametrize("op", REDUCE_OPS)
@pytest.mark.parametrize("dtype", SUM_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (6, 33), (0, 3)], ids=str)
def test_all_reduce(comm, shape, dtype, op):
    x = reduce_pattern(shape, dtype, 4, comm.ranks.rank, op)
    kept = x.clone()
    expected = reduce_expected(shape, dtype, 4, comm.ranks.size, op)
    assert wrong_elements(comm.all_reduce(x, op, label="reduce"), expected) == 0
    assert wrong_elements(x, kept) == 0
    assert comm.all_reduce(x, op, out=x, label="in_place") is x
    assert wrong_elements(x, expected) == 0


@pytest.mark.parametrize("op", REDUCE_OPS)
@pytest.mark.parametrize("dtype", SUM_DTYPES, ids=str)
def test_reduce_scatter(comm, dtype, op):
    world, rank = comm.ranks.size, comm.ranks.rank
    x = reduce_pattern((3 * world, 5), dtype, 6, rank, op)
    expected = reduce_expected((3, 5), dtype, 6, world, op, start=rank * 15)
    assert wrong_elements(comm.reduce_scatter(x, op, label="scatter"), expected) == 0
    assert wrong_elements(comm.reduce_scatter(x, op, exact=True, label="scatter"), expected) == 0
    out = torch.empty(3, 10, dtype=dtype)[:, ::2]
    comm.reduce_scatter(x, op, out=out, label="scatter")
    assert wrong_elements(out, expected) == 0
    assert comm.reduce_scatter(x[:0], op, label="scatter").shape == (0, 5)


@given(st.integers(1, 4), st.integers(1, 9), st.sampled_from([torch.float32, torch.bfloat16, torch.int32]))
def test_gather_of_reduce_scatter_is_all_reduce(comm, rows, width, dtype):
    x = reduce_pattern((rows * comm.ranks.size, width), dtype, rows, comm.ranks.rank)
    both = comm.all_gather(comm.reduce_scatter(x, label="law"), label="law")
    assert wrong_elements(both, comm.all_reduce(x, label="law")) == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_one_shot_sums_have_the_bits_of_the_reference_for_any_data(comm, dtype):
    if not comm.transports[comm.table.fallback].one_shot:
        pytest.skip("process_group sums in the backend's own order (guarantee: reordered sum)")
    world, rank = comm.ranks.size, comm.ranks.rank
    shards = [torch.randn(world * 3, 257, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(world)]
    assert wrong_elements(comm.all_reduce(shards[rank], label="bits"), reference.all_reduce(shards)) == 0
    assert wrong_elements(comm.reduce_scatter(shards[rank], label="bits"), reference.reduce_scatter(shards, rank)) == 0


def test_sums_of_any_data_are_the_same_bits_on_every_rank(comm):
    x = torch.randn(1000, generator=torch.Generator().manual_seed(comm.ranks.rank))
    total = comm.all_reduce(x, label="same").view(torch.int32)
    assert len(set(map(str, comm.agreement.gather(total.tolist(), label="same")))) == 1


def test_mpi_is_the_oracle_of_gloo(place, request):
    if place.launcher != "mpirun":
        pytest.skip("MPI ranks exist only under mpirun")
    from dsv41_dist.comm import Communicator

    mpi = Communicator.create(request.getfixturevalue("mpi_ranks"))
    gloo = Communicator.create(request.getfixturevalue("gloo_ranks"))
    rank, world = mpi.ranks.rank, mpi.ranks.size
    split = TileSplit(1792, 128, world)
    for dtype in (torch.bfloat16, torch.float32, torch.int64):
        x = reduce_pattern((world * 2, 96), dtype, 8, rank)
        cut = byte_pattern((6, split.size(rank)), dtype, 8, rank)
        for run in (
            lambda c, x=x: c.all_reduce(x, label="oracle"),
            lambda c, x=x: c.reduce_scatter(x, label="oracle"),
            lambda c, x=x: c.all_gather(x, 1, label="oracle"),
            lambda c, x=x: c.broadcast(x.clone(), world - 1, label="oracle"),
            lambda c, cut=cut: c.all_gather_columns(cut, split, label="oracle"),
        ):
            assert wrong_elements(run(gloo), run(mpi)) == 0
    mpi.close()
    gloo.close()


def test_bad_calls_are_refused_alike_before_anything_moves(comm):
    x = torch.ones(4, 3)
    world = comm.ranks.size
    split = TileSplit(14 * 16, 16, world)
    mine, more = split.size(comm.ranks.rank), TileSplit(17, 1, world + 1)
    refused = [
        (lambda: comm.all_reduce(x, "avg", label="bad"), "op='avg': allowed is sum, prod, min, max"),
        (lambda: comm.all_reduce(x.to(torch.int16), label="bad"), "dtype=int16: allowed is"),
        (lambda: comm.all_reduce(x.bool(), label="bad"), "dtype=bool"),
        (lambda: comm.all_reduce(x, out=torch.ones(3), label="bad"), r"out: \(3,\)"),
        (lambda: comm.all_reduce(x.to("meta"), label="bad"), "a tensor on meta"),
        (lambda: comm.all_gather(x, 2, label="bad"), "dim=2: allowed is -2 to 1"),
        (lambda: comm.all_gather(torch.tensor(1.0), label="bad"), "dim=0"),
        (lambda: comm.all_gather(x, out=torch.ones(2, 2), label="bad"), "all_gather out"),
        (
            lambda: comm.all_gather_columns(x, split, label="bad"),
            f"gives this rank {mine}",
        ),
        (
            lambda: comm.all_gather_columns(x, more, label="bad"),
            f"a split over {world + 1} ranks",
        ),
        (lambda: comm.reduce_scatter(x, dim=1, label="bad"), "dim=1"),
        (lambda: comm.reduce_scatter(x, out=x[:0], label="bad"), "reduce_scatter out") if 4 % world == 0 else None,
        (lambda: comm.broadcast(x, world, label="bad"), f"src={world}: allowed is 0 to {world - 1}"),
    ]
    for call, text in filter(None, refused):
        with pytest.raises(ArgumentError, match=text):
            call()
    if world > 1:
        with pytest.raises(LayoutError, match=f"{world + 1} rows do not divide over {world} ranks"):
            comm.reduce_scatter(torch.ones(world + 1, 2), label="bad")
    comm.barrier(label="after")
    assert comm.all_reduce(torch.ones(2), label="after").tolist() == [world, world]
