"""The tiny checkpoint: names, formats and shapes; the seed decides every byte."""

from __future__ import annotations

import re

import pytest
import torch

from dsv41_dist.comm.layout import TileSplit
from dsv41_dist.rehearsal.tiny_config import TinyConfig, engram_rows
from dsv41_dist.rehearsal.tiny_model import checkpoint_digest, tensors, write_checkpoint


@pytest.fixture(scope="module")
def one() -> dict[str, torch.Tensor]:
    torch.set_num_threads(1)
    return dict(tensors(TinyConfig(), 1))


def test_it_is_a_few_tens_of_megabytes(one):
    assert 20e6 < sum(t.nbytes for t in one.values()) < 64e6


def test_every_format_of_the_published_checkpoint_is_there(one):
    kinds = {t.dtype for t in one.values()}
    fp8 = (torch.float8_e4m3fn, torch.float8_e8m0fnu)
    assert kinds == {*fp8, torch.int8, torch.bfloat16, torch.float32}
    for name, tensor in one.items():
        if name.endswith(".scale"):
            weight = one[name.removesuffix("scale") + "weight"]
            columns = weight.shape[1] * (2 if weight.dtype == torch.int8 else 1)
            rows = weight.shape[0] // (1 if weight.dtype == torch.int8 or "engram.embed" in name else 32)
            assert tensor.shape == (rows, columns // 32), name
    routed = [n for n in one if re.search(r"\.experts\.\d+\.w[123]\.weight$", n)]
    assert len(routed) == 8 * 8 * 3
    assert {one[n].dtype for n in routed} == {torch.int8}


def test_sizes_exercise_what_four_ranks_find_awkward():
    config = TinyConfig()
    split = TileSplit(n=config.q_lora_rank + config.head_dim, tile=128, world=4)
    assert [split.size(rank) // 128 for rank in range(4)] == [4, 4, 3, 3]
    width = config.expert_width // 4
    assert (width % 32, width % 128) == (0, 96)


def test_structure_of_the_layers(one):
    config = TinyConfig()
    assert set(config.ratios) == {0, 1, 2}
    assert config.candidate_source == max(config.kv_sources) == 3
    owners = {int(n.split(".")[1]) for n in one if ".compressor." in n}
    assert owners == set(config.kv_sources)
    assert {int(n.split(".")[1]) for n in one if ".indexer.wq_b" in n} == set(config.index_sources)
    assert {int(n.split(".")[1]) for n in one if ".indexer.wk." in n} == set(config.kv_sources)
    assert one[f"layers.{config.engram_layer}.engram.embed.weight"].shape == (engram_rows(config), 32)
    assert {n.split(".")[1] for n in one if n.startswith("mtp.")} == {"0", "1"}


def test_the_seed_decides_every_random_tensor_and_nothing_else_does(one):
    again, other = dict(tensors(TinyConfig(), 1)), dict(tensors(TinyConfig(), 2))
    assert list(again) == list(one) == list(other)
    same = [n for n, t in one.items() if torch.equal(t.view(torch.uint8), again[n].view(torch.uint8))]
    assert len(same) == len(one)
    equal = [n for n, t in one.items() if torch.equal(t.view(torch.uint8), other[n].view(torch.uint8))]
    # Scales of blocks are powers of two and may well be the same.
    assert all(n.endswith(".scale") for n in equal), equal


def test_the_digest_covers_seed_sizes_and_replacements():
    config, bigger = TinyConfig(), TinyConfig(hidden=512)
    digests = {
        checkpoint_digest(1, config),
        checkpoint_digest(2, config),
        checkpoint_digest(1, bigger),
        checkpoint_digest(1, config, {"norm.weight": torch.zeros(256)}),
        checkpoint_digest(1, config, {"norm.weight": torch.ones(256)}),
    }
    assert len(digests) == 5
    assert checkpoint_digest(1, config) == checkpoint_digest(1, TinyConfig())


def test_an_unknown_replacement_is_refused(tmp_path):
    with pytest.raises(KeyError, match=r"layers\.9\.nothing"):
        write_checkpoint(tmp_path, replaced={"layers.9.nothing": torch.zeros(1)})
