"""The operations that `bench` and `preflight` run: for each its inputs, its call, its exact result, its bytes.

Sizes follow nccl-tests: `bytes` is the whole tensor of the operation (all_gather: the gathered one; reduce_scatter: the
input of a rank), and busbw = algbw * factor makes the rate comparable to that of a link.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from ..comm import SUM_DTYPES, ArgumentError, Communicator, RowSplit, TileSplit
from ..comm.patterns import byte_pattern, reduce_expected, reduce_pattern, wrong_elements

__all__ = ["DTYPES", "OPERATIONS", "Case", "Operation", "dtype_name"]

#: nccl-tests' names first, then torch's.
DTYPES: dict[str, torch.dtype] = {
    "int8": torch.int8,
    "uint8": torch.uint8,
    "int32": torch.int32,
    "int64": torch.int64,
    "half": torch.float16,
    "float": torch.float32,
    "double": torch.float64,
    "bfloat16": torch.bfloat16,
    "f8e4m3": torch.float8_e4m3fn,
    "f8e5m2": torch.float8_e5m2,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "float8_e8m0fnu": torch.float8_e8m0fnu,
    "bool": torch.bool,
    "complex64": torch.complex64,
}
TILE = 128
SEED = 20
EPSILON = 1e-6


@dataclass(frozen=True)
class Case:
    """One line of a benchmark: [rows, columns] of one rank's input or of the result, as the operation says."""

    op: str
    rows: int
    columns: int
    dtype: str
    redop: str
    world: int

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def item(self) -> int:
        return torch.empty(0, dtype=self.torch_dtype).element_size()


@dataclass
class Ready:
    """A case made ready on one rank: `call` runs it, `reset` wipes its result, `verify` counts wrong elements of the
    last result. They are apart so that the result of a graph replay is checked like that of a call."""

    call: Callable[[], Any]
    reset: Callable[[], Any]
    verify: Callable[[], int]

    def wrong(self) -> int:
        """Run it once on a wiped result and count wrong elements."""
        self.reset()
        self.call()
        return self.verify()


@dataclass(frozen=True)
class Operation:
    """What the benchmark has to know of an operation.

    Attributes:
        reduces: whether redop matters and only summable dtypes are allowed.
        factor: world -> busbw / algbw (nccl-tests, doc/PERFORMANCE.md).
        size: case -> bytes of the operation.
        shape: (bytes, item, world, hidden) -> rows, columns for a size sweep.
        refuse: case -> why it cannot be run, or None.
        floating: whether it works on floating point only.
        ready: makes a case ready on a rank.
    """

    reduces: bool
    factor: Callable[[int], float]
    size: Callable[[Case], int]
    shape: Callable[[int, int, int, int], tuple[int, int]]
    ready: Callable[[Communicator, Case], Ready]
    refuse: Callable[[Case], str | None] = lambda case: None
    floating: bool = False

    def takes_dtype(self, dtype: torch.dtype) -> bool:
        if self.floating and not dtype.is_floating_point:
            return False
        return not self.reduces or dtype in SUM_DTYPES


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _whole(case: Case) -> int:
    return case.rows * case.columns * case.item


def _flat(nbytes: int, item: int, world: int, hidden: int) -> tuple[int, int]:
    return 1, max(1, nbytes // item)


def _shared(nbytes: int, item: int, world: int, hidden: int) -> tuple[int, int]:
    return 1, max(1, nbytes // item // world)


def _by_hidden(nbytes: int, item: int, world: int, hidden: int) -> tuple[int, int]:
    return max(1, nbytes // item // hidden), hidden


def _ring(world: int) -> float:
    return (world - 1) / world


def _copied(comm: Communicator, case: Case, rank: int, columns: int | None = None) -> torch.Tensor:
    shape = (case.rows, case.columns if columns is None else columns)
    return byte_pattern(shape, case.torch_dtype, SEED, rank, comm.ranks.device)


def _summed(comm: Communicator, case: Case, rows: int) -> torch.Tensor:
    shape = (rows, case.columns)
    return reduce_pattern(shape, case.torch_dtype, SEED, comm.ranks.rank, case.redop, comm.ranks.device)


def _sum(comm: Communicator, case: Case, first_row: int = 0) -> torch.Tensor:
    """The exact result in case.rows rows from first_row on."""
    shape, start = (case.rows, case.columns), first_row * case.columns
    return reduce_expected(shape, case.torch_dtype, SEED, case.world, case.redop, comm.ranks.device, start)


def _all_reduce(comm: Communicator, case: Case) -> Ready:
    x = _summed(comm, case, case.rows)
    out = torch.empty_like(x)
    return Ready(
        lambda: comm.all_reduce(x, case.redop, out=out, label="bench"),
        lambda: _wipe(out),
        lambda: wrong_elements(out, _sum(comm, case)),
    )


def gather_ready(comm: Communicator, case: Case, dim: int = 0) -> Ready:
    x = _copied(comm, case, comm.ranks.rank)
    shape = [case.rows, case.columns]
    shape[dim] *= case.world
    out = torch.empty(shape, dtype=x.dtype, device=x.device)
    return Ready(
        lambda: comm.all_gather(x, dim, out=out, label="bench"),
        lambda: _wipe(out),
        lambda: _wrong_bytes(out, (_copied(comm, case, rank) for rank in range(case.world)), dim),
    )


def _all_gather_columns(comm: Communicator, case: Case) -> Ready:
    split = TileSplit(case.columns, TILE, case.world)
    x = _copied(comm, case, comm.ranks.rank, split.size(comm.ranks.rank))
    out = torch.empty((case.rows, case.columns), dtype=x.dtype, device=x.device)
    return Ready(
        lambda: comm.all_gather_columns(x, split, out=out, label="bench"),
        lambda: _wipe(out),
        lambda: _wrong_bytes(out, (_copied(comm, case, r, split.size(r)) for r in range(case.world)), -1),
    )


def _reduce_scatter(comm: Communicator, case: Case) -> Ready:
    x = _summed(comm, case, case.rows * case.world)
    out = torch.empty((case.rows, case.columns), dtype=x.dtype, device=x.device)
    return Ready(
        lambda: comm.reduce_scatter(x, case.redop, out=out, label="bench"),
        lambda: _wipe(out),
        lambda: wrong_elements(out, _sum(comm, case, comm.ranks.rank * case.rows)),
    )


def _broadcast(comm: Communicator, case: Case) -> Ready:
    x = _copied(comm, case, comm.ranks.rank)
    return Ready(
        lambda: comm.broadcast(x, 0, label="bench"),
        lambda: x.copy_(_copied(comm, case, comm.ranks.rank)),
        lambda: wrong_elements(x, _copied(comm, case, 0)),
    )


def _agree(comm: Communicator, case: Case) -> Ready:
    def verify() -> int:
        yes = comm.agreement.agree(True, label="bench")
        no = comm.agreement.agree(comm.ranks.rank != comm.ranks.size - 1, label="bench")
        low = comm.agreement.agree_min(7 + comm.ranks.rank, label="bench")
        return int(not yes) + int(no) + int(low != 7)

    return Ready(lambda: comm.agreement.agree(True, label="bench"), lambda: None, verify)


def row_work(x: torch.Tensor) -> torch.Tensor:
    """What sequence parallelism divides: an RMS norm of each row [rows, hidden], in fp32, back in x's dtype."""
    wide = x.to(torch.float32)
    return (wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + EPSILON)).to(x.dtype)


def _seqpar(comm: Communicator, case: Case) -> Ready:
    x = _summed(comm, case, case.rows)
    out = torch.empty_like(x)
    return Ready(
        lambda: comm.all_gather(row_work(comm.reduce_scatter(x, label="bench")), out=out, label="bench"),
        lambda: _wipe(out),
        lambda: wrong_elements(out, row_work(_sum(comm, case))),
    )


def _seqpar_reference(comm: Communicator, case: Case) -> Ready:
    x = _summed(comm, case, case.rows)
    out = torch.empty_like(x)
    return Ready(
        lambda: out.copy_(row_work(comm.all_reduce(x, label="bench"))),
        lambda: _wipe(out),
        lambda: wrong_elements(out, row_work(_sum(comm, case))),
    )


def _wipe(out: torch.Tensor) -> None:
    out.view(torch.uint8).zero_()


def _wrong_bytes(got: torch.Tensor, parts: Iterable[torch.Tensor], dim: int) -> int:
    """Compare a gather with its parts where they must lie."""
    at, wrong = 0, 0
    for part in parts:
        wrong += wrong_elements(got.narrow(dim, at, part.shape[dim]), part)
        at += part.shape[dim]
    return wrong


def _needs_tiles(case: Case) -> str | None:
    split = TileSplit.plan(case.columns, TILE, case.world)
    return None if split else str(split)


def _needs_rows(case: Case) -> str | None:
    split = RowSplit.plan(case.rows, case.world)
    return None if split else str(split)


def _seq_shape(nbytes: int, item: int, world: int, hidden: int) -> tuple[int, int]:
    rows = max(1, nbytes // item // hidden)
    return max(world, rows // world * world), hidden


def _row_operation(ready: Callable[[Communicator, Case], Ready]) -> Operation:
    return Operation(True, lambda n: 2 * _ring(n), _whole, _seq_shape, ready, _needs_rows, floating=True)


OPERATIONS: dict[str, Operation] = {
    "all_reduce": Operation(True, lambda n: 2 * _ring(n), _whole, _flat, _all_reduce),
    "all_gather": Operation(False, _ring, lambda c: _whole(c) * c.world, _shared, gather_ready),
    "all_gather_columns": Operation(False, _ring, _whole, _by_hidden, _all_gather_columns, _needs_tiles),
    "reduce_scatter": Operation(True, _ring, lambda c: _whole(c) * c.world, _shared, _reduce_scatter),
    "broadcast": Operation(False, lambda n: 1.0, _whole, _flat, _broadcast),
    "agree": Operation(False, lambda n: 1.0, lambda c: 8, lambda b, i, w, h: (1, 1), _agree),
    "seqpar": _row_operation(_seqpar),
    "seqpar_reference": _row_operation(_seqpar_reference),
}


def check_case(case: Case) -> None:
    """Raise ArgumentError for a case that cannot be run, naming the argument."""
    operation = OPERATIONS[case.op]
    if not operation.takes_dtype(case.torch_dtype):
        names = ", ".join(name for name, dtype in DTYPES.items() if operation.takes_dtype(dtype))
        raise ArgumentError(f"--dtype {case.dtype!r} with {case.op}: allowed is {names}")
    reason = operation.refuse(case)
    if reason is not None:
        raise ArgumentError(f"{case.op} of [{case.rows}, {case.columns}]: {reason}")
