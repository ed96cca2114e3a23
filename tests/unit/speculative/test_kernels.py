"""The Triton kernels against their twins, where triton is; tests/engine runs the same in the engine's interpreter."""

from __future__ import annotations

import itertools

import pytest

# As in kernel_cases.py, which needs triton to be imported.
KINDS = ("plain", "equal", "one-hot", "zeros", "top-1", "bf16", "live", "nan draft", "sharp", "probabilities")
KINDS += ("apart",)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("kind", "gamma"), list(itertools.product(KINDS, (1, 2, 3))))
def test_block_verification(interpreter, kind, gamma):
    from tests.unit.speculative import kernel_cases

    assert kernel_cases.KINDS == KINDS
    assert kernel_cases.block_case(kind, gamma) == 8


@pytest.mark.parametrize("gamma", [1, 2, 5])
def test_live_rows(interpreter, gamma):
    from tests.unit.speculative.kernel_cases import live_case

    assert live_case(gamma) == 40


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("in_use", [None, 18])
def test_row_copy(interpreter, packed, in_use):
    from tests.unit.speculative.kernel_cases import copy_case

    assert copy_case(packed, in_use) == 24
