"""What the ranks of a fault test do. Importable by name, because every rank is a process of its own."""

import os
import random
import signal
import threading
import time

import torch

from dsv41_dist.cli.session import join
from dsv41_dist.comm import (
    REDUCE_OPS,
    SUM_DTYPES,
    CommSettings,
    Communicator,
    DisagreementError,
    MismatchError,
    RankTimeout,
    TileSplit,
    TransportError,
)
from dsv41_dist.comm.patterns import byte_pattern, reduce_expected, reduce_pattern, wrong_elements

LOST = 2
KINDS = ["agree", "min", "same", "delay", "invalid", "mixed", "carried"]
WEIGHTS = [40, 20, 15, 5, 6, 6, 8]


def connect(timeout_s=3.0, check=False):
    settings = CommSettings(timeout_s=timeout_s, init_timeout_s=20.0, check=check)
    return Communicator.create(join("own", "cpu", "process_group", settings), settings=settings)


def describe(error, started):
    return {
        "error": type(error).__name__,
        "missing": getattr(error, "missing", None),
        "states": getattr(error, "states", None),
        "reached": {r: list(at) for r, at in getattr(error, "reached", {}).items()},
        "label": getattr(error, "label", None),
        "text": str(error),
        "seconds": time.monotonic() - started,
    }


def lose(rank, size, how, timeout_s, call):
    """Rank 2 is lost before `call`; the others say what they got, that it is final, and go on as a smaller group."""
    comm = connect(timeout_s)
    calls = {
        "all_reduce": lambda: comm.all_reduce(torch.ones(64), label="lost"),
        "all_gather": lambda: comm.all_gather(torch.ones(64), label="lost"),
        "agree": lambda: comm.agreement.agree(True, label="lost"),
        "barrier": lambda: comm.barrier(label="lost"),
    }
    for _ in range(3):
        comm.all_reduce(torch.ones(4), label="before")
    time.sleep(0.6)  # two heartbeats: the others have this rank's position
    if rank == LOST % size:
        if how == "skip":
            time.sleep(timeout_s + 2.5)
        elif how == "exit":
            os._exit(9)
        else:
            os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[how])
            if how == "stop":
                # Awake again: what is final for the others is final here too.
                time.sleep(0.5)
    started = time.monotonic()
    try:
        calls[call]()
    except RankTimeout as error:
        found = describe(error, started)
    else:
        return {"error": None}
    try:
        comm.all_reduce(torch.ones(2), label="later")
    except RankTimeout as error:
        found["again"] = error.missing == found["missing"]
    if rank not in found["missing"]:
        smaller = Communicator.create(comm.ranks.without(found["missing"]), settings=CommSettings(timeout_s=20))
        smaller.barrier(label="after")
        found["sum"] = smaller.all_reduce(torch.ones(2), label="after").tolist()
    return found


def straggle(rank, size, seconds):
    """Rank 2 is late, but within the bound: nothing may fail."""
    comm = connect(timeout_s=seconds + 4)
    if rank == LOST % size:
        time.sleep(seconds)
    total = comm.all_reduce(torch.ones(3), label="late").tolist()
    return total, comm.agreement.agree(True, label="late")


def raise_on_one(rank, size, where):
    """Rank 1 raises; where it was."""
    if where == "start" and rank == 1:
        raise ValueError("broken before joining")
    comm = connect(timeout_s=60)
    if rank == 1:
        raise ValueError("broken on purpose")
    comm.all_reduce(torch.ones(3), label="never")


def mismatch_unchecked(rank, size):
    """Without checked mode two different calls end in an error on every rank, within the bound."""
    comm = connect(timeout_s=2.0)
    time.sleep(0.6)
    started = time.monotonic()
    try:
        if rank == LOST % size:
            comm.agreement.agree(True, label="other")
        else:
            comm.all_reduce(torch.ones(3), label="usual")
    except (RankTimeout, TransportError) as error:
        return describe(error, started)
    return {"error": None}


def environment_on_one(rank, size):
    """Settings are read from each rank's environment."""
    settings = CommSettings.from_env()
    try:
        Communicator.create(join("own", "cpu", "process_group", settings), settings=settings)
    except DisagreementError as error:
        return {"error": "DisagreementError", "said": error.said, "text": str(error)}
    return {"error": None}


def soak(rank, size, calls):
    """Open files and memory before and after many calls."""
    import resource

    comm = connect(timeout_s=60)
    counts = []
    for index in range(calls):
        comm.agreement.agree(True, label="soak")
        comm.all_reduce(torch.ones(16), label="soak")
        if index in (calls // 4, calls - 1):
            rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            counts.append((len(os.listdir("/proc/self/fd")), threading.active_count(), rss))
    return counts


def rounds(rank, size, seed, number, path, kill_at):
    """Random agreements with faults mixed in; every outcome is written down before the next round begins.

    The plan of a round follows from (seed, round) on every rank. In round `kill_at` rank `seed % size` dies at a random
    moment in or near the vote.
    """
    comm = connect(timeout_s=10.0)
    with open(f"{path}/{rank}", "w", buffering=1) as log:
        for index in range(number):
            plan = random.Random(seed * 1_000_003 + index)
            kind = plan.choices(
                ["agree", "min", "same", "delay", "invalid", "mixed", "carried"], [40, 20, 15, 5, 6, 6, 8]
            )[0]
            odd, flags = plan.randrange(size), [plan.random() < 0.8 for _ in range(size)]
            if index == kill_at and rank == seed % size:
                delay = plan.random() * 0.012
                threading.Thread(target=lambda d=delay: (time.sleep(d), os.kill(os.getpid(), signal.SIGKILL))).start()
                time.sleep(plan.random() * 0.006)
            try:
                outcome = _round(comm, kind, rank, odd, flags, index)
            except (DisagreementError, MismatchError) as error:
                outcome = f"{type(error).__name__}:{sorted(error.said)}"
            except RankTimeout as error:
                log.write(f"{index} {kind} RankTimeout {error.missing}\n")
                return index
            log.write(f"{index} {kind} {outcome}\n")
    return number


def _round(comm, kind, rank, odd, flags, index):
    vote = comm.agreement
    if kind == "min":
        return vote.agree_min(index * 7 + (rank + odd) % comm.ranks.size, label="min")
    if kind == "same":
        return vote.same_everywhere([index, rank == odd and not flags[0]], label="same")
    if kind == "delay" and rank == odd:
        time.sleep(0.01)
    if kind == "invalid":
        return vote.agree(None if rank == odd else flags[rank], label="invalid")
    if kind == "mixed":
        return vote.agree(flags[rank], label="other" if rank == odd else "usual")
    if kind == "carried":
        # A local failure is carried to the vote, not raised before it.
        try:
            if rank == odd:
                raise OSError("local")
            fine = True
        except OSError:
            fine = False
        return vote.agree(fine, label="carried")
    return vote.agree(flags[rank], label="agree")


def every_reduction(rank, size):
    """Wrong elements over all reductions and types, an uneven column gather and the votes."""
    comm = connect(timeout_s=60)
    split = TileSplit(34 * 16, 16, size)
    wrong = 0
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.complex64):
        got = comm.all_gather_columns(byte_pattern((5, split.size(rank)), dtype, 1, rank), split, label="columns")
        for r, (start, width) in enumerate(zip(split.starts, split.sizes, strict=True)):
            wrong += wrong_elements(got[:, start : start + width], byte_pattern((5, width), dtype, 1, r))
    for op in REDUCE_OPS:
        for dtype in SUM_DTYPES:
            x = reduce_pattern((size * 2, 7), dtype, 3, rank, op)
            expected = reduce_expected((size * 2, 7), dtype, 3, size, op)
            wrong += wrong_elements(comm.all_reduce(x, op, label="reduce"), expected)
            wrong += wrong_elements(comm.reduce_scatter(x, op, label="scatter"), expected[2 * rank : 2 * rank + 2])
    return wrong, comm.agreement.agree(rank != size - 1, label="no"), comm.agreement.agree_min(rank, label="low")


def leave_without_a_word(rank, size, who):
    """Rank `who` (None: every rank) ends its process from within; another one waits for it in vain."""
    if who in (None, rank):
        os._exit(3)
    time.sleep(60)
