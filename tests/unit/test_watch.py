"""What a wait makes of a backend's answer that comes just as one of its slices ends."""

import pytest
import torch

from dsv41_dist.comm import CommSettings, Ranks, TransportError
from dsv41_dist.comm.watch import Watch


class Work:
    """A torch Work that has ended by the time its first wait says that it timed out."""

    def __init__(self, *errors):
        self.errors = list(errors)

    def wait(self, timeout=None):
        if self.errors:
            raise RuntimeError(self.errors.pop(0))

    def is_completed(self):
        return True


def watch():
    return Watch(Ranks(0, 1, torch.device("cpu"), None, None, None), CommSettings())


def test_a_call_that_ends_well_with_its_slice_has_ended_well():
    one = watch()
    one.wait(Work("Operation timed out!"))
    assert not one.closed


def test_a_call_that_failed_is_reported_with_its_own_error():
    one = watch()
    with pytest.raises(TransportError, match="the backend says: connection closed by peer"):
        one.wait(Work("Operation timed out!", "connection closed by peer\nat line 7"))
    assert one.closed
