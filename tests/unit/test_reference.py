"""The meaning of the operations, and the patterns whose results are known."""

import pytest
import torch

from dsv41_dist.comm import REDUCE_OPS, SUM_DTYPES, TileSplit, reference
from dsv41_dist.comm.patterns import byte_pattern, reduce_expected, reduce_pattern, wrong_elements

HALF = [torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", HALF)
def test_sums_round_once(dtype):
    # 256 + 1 + 1 (bf16) is 258 rounded once, but 256 when every step is rounded.
    big = 2.0 ** (8 if dtype == torch.bfloat16 else 11)
    shards = [torch.tensor([v], dtype=dtype) for v in (big, 1.0, 1.0)]
    assert reference.reduce(shards).item() == big + 2
    assert (shards[0] + shards[1] + shards[2]).item() == big


def test_sums_are_in_rank_order():
    shards = [torch.tensor([v]) for v in (1e8, 1.0, -1e8)]
    assert reference.reduce(shards).item() == 0.0
    assert reference.reduce([shards[0], shards[2], shards[1]]).item() == 1.0


def test_sums_begin_with_rank_0_itself():
    shards = [torch.tensor([-0.0], dtype=torch.bfloat16)] * 4
    assert torch.signbit(reference.reduce(shards)).item()


def test_integers_are_exact_and_wrap():
    shards = [torch.tensor([2**31 - 1], dtype=torch.int32), torch.tensor([1], dtype=torch.int32)]
    assert reference.reduce(shards).item() == -(2**31)
    big = [torch.tensor([2**62 + 1], dtype=torch.int64)] * 1 + [torch.tensor([1], dtype=torch.int64)]
    assert reference.reduce(big).item() == 2**62 + 2


def test_min_and_max_propagate_nan():
    shards = [torch.tensor([1.0, float("nan")]), torch.tensor([float("nan"), 2.0])]
    assert reference.reduce(shards, "min").isnan().all()
    assert reference.reduce(shards, "max").isnan().all()


def test_an_unknown_operation_is_refused():
    with pytest.raises(ValueError, match="op='avg'"):
        reference.reduce([torch.ones(1)] * 2, "avg")


@pytest.mark.parametrize("op", REDUCE_OPS)
@pytest.mark.parametrize("dtype", SUM_DTYPES)
@pytest.mark.parametrize("world", [1, 4, 16])
def test_patterns_have_the_result_they_promise_in_any_order(dtype, op, world):
    shards = [reduce_pattern((7, 33), dtype, 3, rank, op) for rank in range(world)]
    expected = reduce_expected((7, 33), dtype, 3, world, op)
    assert wrong_elements(reference.reduce(shards, op), expected) == 0
    assert wrong_elements(reference.reduce(shards[::-1], op), expected) == 0
    # Rounding at every step changes nothing either: that is what makes them fit for any backend.
    stepwise = shards[0]
    for shard in shards[1:]:
        stepwise = reference.reduce([stepwise, shard], op)
    assert wrong_elements(stepwise, expected) == 0


def test_a_part_of_the_expected_result():
    whole = reduce_expected((8, 5), torch.float32, 1, 4)
    assert torch.equal(reduce_expected((3, 5), torch.float32, 1, 4, start=2 * 5), whole[2:5])


def test_patterns_differ_by_rank_seed_and_index():
    a = byte_pattern((64,), torch.uint8, 1, 0)
    assert not torch.equal(a, byte_pattern((64,), torch.uint8, 1, 1))
    assert not torch.equal(a, byte_pattern((64,), torch.uint8, 2, 0))
    assert len(set(a.tolist())) > 32
    assert len(set(reduce_pattern((4096,), torch.float32, 1, 0).tolist())) == 31


def test_wrong_elements_counts_bytes_not_values():
    a = torch.tensor([0.0, float("nan"), 1.0])
    assert wrong_elements(a, a.clone()) == 0
    assert wrong_elements(a, torch.tensor([-0.0, float("nan"), 1.0])) == 1
    assert wrong_elements(torch.empty(0), torch.empty(0)) == 0
    with pytest.raises(ValueError, match="against"):
        wrong_elements(a, a.to(torch.float64))


def test_column_gather_is_pad_gather_cat():
    split = TileSplit(1792, 128, 4)
    shards = [byte_pattern((5, split.size(r)), torch.bfloat16, 1, r) for r in range(4)]
    padded = [torch.nn.functional.pad(s.view(torch.int16), (0, split.widest - s.shape[1])) for s in shards]
    cat = torch.cat([p[:, : split.size(r)] for r, p in enumerate(padded)], dim=1).view(torch.bfloat16)
    assert wrong_elements(reference.all_gather_columns(shards, split), cat) == 0
