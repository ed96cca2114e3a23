"""The noise: known answers, its laws, and independence of the draws that must be independent."""

from __future__ import annotations

import math

import pytest
import torch

from dsv41_dist.kernels.philox import block, exponential, uniform, words

# Known answers of the Random123 distribution for philox4x32-10: counter, key, output.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "wanted"), KNOWN)
def test_known_answers(counter, key, wanted):
    got = block(tuple(torch.tensor(word) for word in counter), *(torch.tensor(word) for word in key))
    assert tuple(int(word) for word in got) == wanted


def test_a_word_depends_on_key_step_domain_row_and_column():
    state = torch.tensor([(5 << 32) | 9, 3])
    base = words(state, 4, 64, 0)
    for other in (
        words(torch.tensor([(5 << 32) | 8, 3]), 4, 64, 0),
        words(torch.tensor([(6 << 32) | 9, 3]), 4, 64, 0),
        words(torch.tensor([(5 << 32) | 9, 4]), 4, 64, 0),
        words(state, 4, 64, 1),
    ):
        assert not (base == other).any()
    assert base.unique().numel() == base.numel()
    assert torch.equal(words(state, 2, 64, 0), base[:2])  # a row does not depend on the batch


def test_uniform_and_exponential_have_their_laws():
    state = torch.tensor([123456789, 0])
    u = uniform(state, 100, 1000, 0).double().flatten()
    assert float(u.min()) >= 0
    assert float(u.max()) < 1
    e = exponential(state, 100, 1000, 1).double().flatten()
    assert float(e.min()) > 0
    for values, law in ((u, lambda x: x), (e, lambda x: 1 - (-x).exp())):
        ordered = values.sort().values
        steps = torch.arange(1, len(values) + 1) / len(values)
        # Kolmogorov-Smirnov: 1.95 / sqrt(n) is the 0.1 % point; the noise is fixed by its key.
        assert float((law(ordered) - steps).abs().max()) < 1.95 / math.sqrt(len(values))


def test_the_smallest_exponentials_keep_their_digits(monkeypatch):
    from dsv41_dist.kernels import philox

    word = torch.tensor([[0, 1, 2**20, 2**26 - 1, 2**26, 2**31, 2**32 - 1]])
    monkeypatch.setattr(philox, "words", lambda *_: word)
    got = philox.exponential(torch.tensor([0, 0]), 1, 7, 1).double()
    u = (word.double() + 0.5) / 2**32
    # A float32 word near 2^32 has a spacing of 2^8, so the far tail is as coarse as it may be.
    torch.testing.assert_close(got[:, :6], (-torch.log1p(-u))[:, :6], rtol=3e-7, atol=0)
    assert torch.isfinite(got).all()
