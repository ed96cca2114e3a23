"""What the ranks of test_edges do."""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

from dsv41_dist.cli.session import join
from dsv41_dist.comm import CommError, CommSettings, Communicator, Ranks, RouteTable

from .targets import connect


def caught(call):
    """(the class of the error, its text), or None when there was none."""
    try:
        call()
    except CommError as error:
        return type(error).__name__, str(error)
    return None


def other_numbers_of_groups(rank, size):
    """Ranks 0 and 1 are in one torch group more than the others; then the ranks of all, and of a smaller group."""
    join("own", "cpu", "process_group", CommSettings())
    dist.new_group([0, 1])
    comm = Communicator.create(Ranks.from_torch())
    total = comm.all_reduce(torch.ones(2), label="all").tolist()
    if rank == 0:
        dist.new_group([0], use_local_synchronization=True)
    again = Communicator.create(Ranks.from_torch())
    total += again.all_reduce(torch.ones(2), label="again").tolist()
    if rank != 1:
        left = Communicator.create(comm.ranks.without([1]))
        total += left.all_reduce(torch.ones(2), label="left").tolist()
    return total


def log_folder(rank, size):
    settings = CommSettings.from_env()
    ranks = join("own", "cpu", "process_group", settings)
    started = time.monotonic()
    return caught(lambda: Communicator.create(ranks, settings=settings)), time.monotonic() - started


def other_encodings(rank, size):
    """A path whose bytes are no UTF-8, as Python hands it over."""
    comm = connect()
    text = os.fsdecode(b"caf\xe9")
    differs = caught(lambda: comm.agreement.same_everywhere(text if rank == 0 else "x", label="path"))
    same = comm.agreement.same_everywhere(text, label="path") == text
    return differs, same, comm.agreement.gather(text * (rank + 1), label="paths") == [text, text * 2]


def wrong_tables(rank, size):
    ranks = join("own", "cpu", "process_group", CommSettings())
    fallback = caught(lambda: Communicator.create(ranks, table=RouteTable("peer")))
    comm = Communicator.create(ranks)
    return {
        "fallback": fallback,
        "routed": caught(lambda: comm.routed(RouteTable("peer"), label="other")),
        "empty": caught(lambda: comm.all_reduce(torch.ones(3), "", label="x")),
        "empty of bool": caught(lambda: comm.reduce_scatter(torch.ones(2, dtype=torch.bool), "", label="x")),
        "sum": comm.all_reduce(torch.ones(3), label="x").tolist(),
    }


def closed(rank, size, folder):
    settings = CommSettings(timeout_s=6.0, log_dir=folder)
    ranks = join("own", "cpu", "process_group", settings)
    for _ in range(3):
        comm = Communicator.create(ranks, settings=settings)
        comm.close()
    started = time.monotonic()
    errors = [
        caught(lambda: comm.all_reduce(torch.ones(3), label="x")),
        caught(lambda: comm.agreement.agree(True, label="y")),
        caught(comm.check),
    ]
    held = [fd for fd in Path("/proc/self/fd").iterdir() if ".jsonl" in os.path.realpath(fd)]
    return errors, time.monotonic() - started, len(held)


def votes(rank, size, rounds):
    """Keys in the store after one round of votes, and after many, some through the store and some not."""
    comm = connect(check=True)

    def some(count):
        for _ in range(count):
            comm.agreement.agree(True, label="vote")
            comm.all_reduce(torch.ones(1), label="sum")
        return comm.ranks.store.num_keys()

    return some(1), some(rounds)
