"""Writes a tiny V4.1 checkpoint in the published names and formats, from a seed: what the engine's own loader reads.

Weights are scaled so that the text depends on the whole prompt: sublayer outputs weigh as much as the embedding,
attention scores have a standard deviation of about three (so that single positions win), and the router's choices are
spread. The draft's Markov head knows a bigram that the embedding and the head share, so that part of its guesses are
right. Each tensor is drawn from its own generator, keyed by the seed and its name.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from .formats import encode_block_fp8, encode_mxfp4, encode_row_fp8
from .tiny_config import TinyConfig, engram_rows

__all__ = ["checkpoint_digest", "checkpoint_folder", "tensors", "write_checkpoint"]

_SHARD_BYTES = 12 << 20
_BF16 = torch.bfloat16
_BIGRAM = 2.5  # weight of the bigram in the embedding, next to values of standard deviation one


class _Draw:
    """Named random tensors."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def normal(self, name: str, *shape: int, std: float, mean: float = 0.0) -> torch.Tensor:
        key = hashlib.sha256(f"{self.seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "little") >> 1)
        return torch.randn(*shape, generator=generator) * std + mean

    def matrix(self, name: str, out: int, inner: int, gain: float) -> torch.Tensor:
        """[out, inner] that maps inputs of RMS 1 to outputs of RMS `gain`."""
        return self.normal(name, out, inner, std=gain / math.sqrt(inner))

    def fp8(self, name: str, out: int, inner: int, gain: float = 1.0) -> Iterator[tuple[str, torch.Tensor]]:
        codes, scale = encode_block_fp8(self.matrix(name, out, inner, gain))
        yield f"{name}.weight", codes
        yield f"{name}.scale", scale

    def fp4(self, name: str, out: int, inner: int, gain: float) -> Iterator[tuple[str, torch.Tensor]]:
        packed, scale = encode_mxfp4(self.matrix(name, out, inner, gain))
        yield f"{name}.weight", packed
        yield f"{name}.scale", scale

    def norm(self, name: str, size: int) -> tuple[str, torch.Tensor]:
        return f"{name}.weight", self.normal(name, size, std=0.1, mean=1.0).to(_BF16)


def tensors(config: TinyConfig, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the checkpoint as (published name, tensor)."""
    draw = _Draw(seed)
    before, after = _bigram(config, draw)
    embed = draw.normal("embed", config.vocab, config.hidden, std=1.0)
    head = draw.matrix("head", config.vocab, config.hidden, 4.0)
    basis = torch.linalg.qr(draw.normal("bigram.basis", config.hidden, config.markov_rank, std=1.0)).Q
    yield "embed.weight", (embed + _BIGRAM * before @ basis.t()).to(_BF16)
    yield "head.weight", (head + 4.0 * after @ basis.t()).to(_BF16)
    yield draw.norm("norm", config.hidden)
    for layer in range(config.layers):
        yield from _decoder(config, draw, f"layers.{layer}")
        yield from _sources(config, draw, layer)
    yield from _engram(config, draw)
    yield from _draft(config, draw)


def _bigram(config: TinyConfig, draw: _Draw) -> tuple[torch.Tensor, torch.Tensor]:
    """Two tables [vocab, rank]; the score of token v after token t is after[v] . before[t], with deviation one."""
    before = draw.normal("bigram.before", config.vocab, config.markov_rank, std=1.0)
    return before, draw.matrix("bigram.after", config.vocab, config.markov_rank, 1.0)


def _decoder(config: TinyConfig, draw: _Draw, at: str) -> Iterator[tuple[str, torch.Tensor]]:
    hidden, heads, dim = config.hidden, config.heads, config.head_dim
    yield from draw.fp8(f"{at}.attn.wq_a", config.q_lora_rank, hidden)
    yield from draw.fp8(f"{at}.attn.wkv", dim, hidden)
    yield draw.norm(f"{at}.attn.q_norm", config.q_lora_rank)
    yield draw.norm(f"{at}.attn.kv_norm", dim)
    yield from draw.fp8(f"{at}.attn.wq_b", heads * dim, config.q_lora_rank, 3.0)
    yield from draw.fp8(f"{at}.attn.wo_a", config.o_groups * config.o_lora_rank, heads * dim // config.o_groups)
    yield from draw.fp8(f"{at}.attn.wo_b", hidden, config.o_groups * config.o_lora_rank, 0.7)
    yield f"{at}.attn.attn_sink", draw.normal(f"{at}.attn.attn_sink", heads, std=0.5)
    yield draw.norm(f"{at}.attn_norm", hidden)
    yield draw.norm(f"{at}.ffn_norm", hidden)
    mixes = (2 + config.hc_mult) * config.hc_mult
    for part in ("attn", "ffn"):
        yield f"{at}.hc_{part}_fn", draw.matrix(f"{at}.hc_{part}_fn", mixes, config.hc_mult * hidden, 1.0)
        yield f"{at}.hc_{part}_base", draw.normal(f"{at}.hc_{part}_base", mixes, std=0.5)
        yield f"{at}.hc_{part}_scale", draw.normal(f"{at}.hc_{part}_scale", 3, std=0.1, mean=0.5)
    yield f"{at}.ffn.gate.weight", draw.matrix(f"{at}.ffn.gate", config.experts, hidden, 2.0).to(_BF16)
    yield f"{at}.ffn.gate.bias", draw.normal(f"{at}.ffn.gate.bias", config.experts, std=0.1)
    for expert in range(config.experts):
        name = f"{at}.ffn.experts.{expert}"
        yield from draw.fp4(f"{name}.w1", config.expert_width, hidden, 1.5)
        yield from draw.fp4(f"{name}.w3", config.expert_width, hidden, 1.5)
        yield from draw.fp4(f"{name}.w2", hidden, config.expert_width, 0.5)
    name = f"{at}.ffn.shared_experts"
    yield from draw.fp8(f"{name}.w1", config.expert_width, hidden, 1.5)
    yield from draw.fp8(f"{name}.w3", config.expert_width, hidden, 1.5)
    yield from draw.fp8(f"{name}.w2", hidden, config.expert_width, 0.5)


def _sources(config: TinyConfig, draw: _Draw, layer: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Compressor and indexer, on the layers that own them."""
    at, dim = f"layers.{layer}.attn", config.head_dim
    if layer in config.kv_sources:
        yield f"{at}.compressor.wkv.weight", draw.matrix(f"{at}.compressor.wkv", dim, config.hidden, 1.0).to(_BF16)
        if config.ratios[layer] > 1:
            gate = draw.matrix(f"{at}.compressor.wgate", dim, config.hidden, 1.0)
            yield f"{at}.compressor.wgate.weight", gate.to(_BF16)
        yield draw.norm(f"{at}.compressor.norm", dim)
    if layer in config.index_sources:
        yield from draw.fp8(f"{at}.indexer.wq_b", config.index_heads * config.index_dim, config.q_lora_rank)
        weights = draw.matrix(f"{at}.indexer.weights_proj", config.index_heads, config.hidden, 1.0)
        yield f"{at}.indexer.weights_proj.weight", weights.to(_BF16)
        if layer in config.kv_sources:
            yield f"{at}.indexer.wk.weight", draw.matrix(f"{at}.indexer.wk", config.index_dim, dim, 1.0).to(_BF16)
            yield draw.norm(f"{at}.indexer.k_norm", config.index_dim)


def _engram(config: TinyConfig, draw: _Draw) -> Iterator[tuple[str, torch.Tensor]]:
    at = f"layers.{config.engram_layer}.engram"
    codes, scale = encode_row_fp8(draw.normal(f"{at}.embed", engram_rows(config), config.engram_head_dim, std=1.0))
    yield f"{at}.embed.weight", codes
    yield f"{at}.embed.scale", scale
    columns = (config.engram_ngram - 1) * config.engram_heads * config.engram_head_dim
    yield from draw.fp8(f"{at}.wkv", config.hidden * (config.hc_mult + 1), columns)
    for part in ("q_weight", "k_weight"):
        yield f"{at}.{part}", draw.normal(f"{at}.{part}", config.hc_mult, config.hidden, std=0.1, mean=1.0).to(_BF16)


def _draft(config: TinyConfig, draw: _Draw) -> Iterator[tuple[str, torch.Tensor]]:
    stages = len(config.draft_targets)
    for stage in range(stages):
        yield from _decoder(config, draw, f"mtp.{stage}")
    yield from draw.fp8("mtp.0.main_proj", config.hidden, config.hidden * stages)
    yield draw.norm("mtp.0.main_norm", config.hidden)
    last = f"mtp.{stages - 1}"
    yield draw.norm(f"{last}.norm", config.hidden)
    before, after = _bigram(config, draw)
    yield f"{last}.markov_head.embed.weight", before.to(_BF16)
    yield f"{last}.markov_head.head.weight", (16.0 * after).to(_BF16)
    confidence = draw.matrix(f"{last}.confidence_head.proj", 1, config.hidden + config.markov_rank, 1.0)
    yield f"{last}.confidence_head.proj.weight", confidence


def write_checkpoint(
    folder: str | Path,
    *,
    seed: int = 1,
    config: TinyConfig | None = None,
    replaced: dict[str, torch.Tensor] | None = None,
) -> Path:
    """Write config, safetensors shards with their index, and a word-level tokenizer; return the folder.

    `replaced` overrides tensors by published name (tests change one at a time); an unknown name is a KeyError.
    A folder that holds the same checkpoint already is left alone. A new one is written beside it and moved, so that a
    reader never sees half of one.
    """
    folder, config, replaced = Path(folder), config or TinyConfig(), dict(replaced or {})
    digest = checkpoint_digest(seed, config, replaced)
    stamp = folder / "rehearsal.digest"
    if stamp.is_file() and stamp.read_text() == digest:
        return folder
    shards: list[dict[str, torch.Tensor]] = [{}]
    for name, tensor in tensors(config, seed):
        if sum(t.nbytes for t in shards[-1].values()) > _SHARD_BYTES:
            shards.append({})
        shards[-1][name] = replaced.pop(name, tensor).contiguous()
    if replaced:
        raise KeyError(f"no such tensors in the tiny checkpoint: {', '.join(sorted(replaced))}")
    from safetensors.torch import save_file

    partial = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
    partial.mkdir(parents=True)
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, partial / file)
        index.update(dict.fromkeys(shard, file))
    total = sum(t.nbytes for shard in shards for t in shard.values())
    _json(partial / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": index})
    _json(partial / "config.json", config.as_json())
    _json(partial / "tokenizer.json", _tokenizer(config.vocab))
    special = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    _json(partial / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **special})
    (partial / stamp.name).write_text(digest)
    if stamp.is_file() and stamp.read_text() == digest:  # another process was faster, and may be in use by now
        shutil.rmtree(partial)
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    try:
        partial.rename(folder)
    except OSError:
        shutil.rmtree(partial)
    return folder


def checkpoint_folder(root: Path, seed: int) -> Path:
    """Where the default checkpoint of a seed is kept under `root`: a folder of its own for every version of it."""
    return root / f"tiny-{seed}-{checkpoint_digest(seed, TinyConfig())}"


def checkpoint_digest(seed: int, config: TinyConfig, replaced: dict[str, torch.Tensor] | None = None) -> str:
    """16 hex digits over everything that decides the checkpoint's bytes, this code included."""
    digest = hashlib.sha256(json.dumps([seed, config.as_json()], sort_keys=True).encode())
    for source in (Path(__file__), Path(__file__).with_name("formats.py"), Path(__file__).with_name("tiny_config.py")):
        digest.update(source.read_bytes())
    for name, tensor in sorted((replaced or {}).items()):
        digest.update(name.encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _tokenizer(vocab: int) -> dict[str, object]:
    words = {"<bos>": 0, "<eos>": 1, "<pad>": 2}
    words.update({f"w{number}": number for number in range(3, vocab)})
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "<pad>"},
    }


def _json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
