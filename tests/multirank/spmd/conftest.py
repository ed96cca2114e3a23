"""One group per job: gloo, and under mpirun MPI too, so that each can be the other's oracle."""

import os

import pytest
from hypothesis import settings

from dsv41_dist.cli.session import choose_place, join
from dsv41_dist.comm import CommSettings, Communicator

settings.register_profile("spmd", derandomize=True, database=None, deadline=None, max_examples=25)
settings.load_profile("spmd")


@pytest.fixture(scope="session")
def place():
    if not any(name in os.environ for name in ("RANK", "OMPI_COMM_WORLD_RANK")):
        pytest.skip("runs on every rank of a group: launch/torchrun_tests.sh or launch/mpirun_tests.sh")
    return choose_place(None)


@pytest.fixture(scope="session")
def gloo_ranks(place):
    return join(place.launcher, "cpu", "process_group", CommSettings.from_env())


@pytest.fixture(scope="session")
def mpi_ranks(place):
    assert place.launcher == "mpirun"
    return join(place.launcher, "cpu", "mpi", CommSettings.from_env())


def pytest_generate_tests(metafunc):
    if "ranks" in metafunc.fixturenames:
        under_mpi = "OMPI_COMM_WORLD_RANK" in os.environ
        metafunc.parametrize(
            "ranks", ["process_group", "mpi"] if under_mpi else ["process_group"], indirect=True, scope="session"
        )


@pytest.fixture(scope="session")
def ranks(request):
    return request.getfixturevalue("mpi_ranks" if request.param == "mpi" else "gloo_ranks")


@pytest.fixture(scope="session")
def comm(ranks):
    communicator = Communicator.create(ranks)
    yield communicator
    communicator.close()


@pytest.fixture(scope="session")
def checked(ranks):
    communicator = Communicator.create(ranks, settings=CommSettings(timeout_s=20, check=True))
    yield communicator
    communicator.close()
