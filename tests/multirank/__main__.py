"""The same tests on every rank of a group: `torchrun --nproc-per-node N -m tests.multirank`, or under mpirun.

Rank 0 reports; another rank says one line for a test that failed on it. The first failure on any rank ends the group.
"""

import os
import sys
from pathlib import Path

import pytest

from dsv41_dist.cli.session import choose_place, end_group, leave


class OneLine:
    """What ranks other than 0 print."""

    def __init__(self, rank):
        self.rank = rank

    def pytest_runtest_logreport(self, report):
        if report.failed:
            last = str(report.longrepr).strip().splitlines()[-1]
            print(f"rank {self.rank}: {report.nodeid} failed: {last}", file=sys.stderr, flush=True)


def main():
    os.environ.setdefault("DSV41_COMM_TIMEOUT_S", "20")
    place = choose_place(None)
    # Examples must be the same on every rank, and so must their order: no cache, no random seeds of a rank's own.
    arguments = [
        str(Path(__file__).parent / "spmd"),
        "-x",
        "-q",
        "-rf",
        "--color=no",
        "-p",
        "no:cacheprovider",
        *sys.argv[1:],
    ]
    plugins = []
    if place.rank:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (for the life of the process)
        plugins.append(OneLine(place.rank))
    code = int(pytest.main(arguments, plugins))
    if code:
        end_group(place.launcher, code)
    leave(place.launcher, 0)


main()
