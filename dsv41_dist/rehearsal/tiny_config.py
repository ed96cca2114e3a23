"""The configuration of the tiny V4.1: every structure of the published one, at sizes for four CPU processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["TinyConfig", "engram_rows"]


@dataclass(frozen=True)
class TinyConfig:
    """Sizes. The defaults keep V4.1's divisibility at TP4:

    - `q_lora_rank + head_dim` is 1792 = 14 tiles of 128, which four ranks split 4/4/3/3;
    - an expert's width per rank is 96: a multiple of 32, not of 128;
    - layers: sliding window, two at compress ratio 2 (the first owns the KV), the last KV source at ratio 1 (also index
      and candidate source), a sliding-window layer, and a late layer that reads the source's KV and candidates;
    - one Engram layer before the late ones; a DSpark draft of two stages.
    """

    hidden: int = 256
    vocab: int = 1024
    heads: int = 4
    head_dim: int = 512
    rope_dim: int = 64
    q_lora_rank: int = 1280
    o_groups: int = 4
    o_lora_rank: int = 64
    experts: int = 8
    experts_per_token: int = 2
    expert_width: int = 384
    hc_mult: int = 4
    ratios: tuple[int, ...] = (0, 2, 2, 1, 0, 1)
    kv_sources: tuple[int, ...] = (1, 3)
    index_sources: tuple[int, ...] = (1, 3, 5)
    candidate_source: int = 3
    candidate_blocks: int = 64
    candidate_block: int = 8
    index_heads: int = 8
    index_dim: int = 128
    index_topk: int = 512
    window: int = 128
    max_positions: int = 4096
    engram_layer: int = 2
    engram_ngram: int = 4
    engram_heads: int = 4
    engram_head_dim: int = 32
    engram_vocab: int = 500
    draft_targets: tuple[int, ...] = (2, 5)
    draft_block: int = 5
    markov_rank: int = 64

    @property
    def layers(self) -> int:
        return len(self.ratios)

    def as_json(self) -> dict[str, Any]:
        """config.json of the checkpoint, with the published field names."""
        return {
            "architectures": ["DeepseekV4ForCausalLM"],
            "model_type": "deepseek_v41",
            "torch_dtype": "bfloat16",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.expert_width,
            "moe_intermediate_size": self.expert_width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": 1,
            "head_dim": self.head_dim,
            "qk_rope_head_dim": self.rope_dim,
            "qk_nope_head_dim": self.head_dim - self.rope_dim,
            "v_head_dim": self.head_dim,
            "q_lora_rank": self.q_lora_rank,
            "kv_lora_rank": self.head_dim,
            "o_lora_rank": self.o_lora_rank,
            "o_groups": self.o_groups,
            "n_routed_experts": self.experts,
            "n_shared_experts": 1,
            "num_experts_per_tok": self.experts_per_token,
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "noaux_tc",
            "scoring_func": "sqrtsoftplus",
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.5,
            "first_k_dense_replace": 0,
            "moe_layer_freq": 1,
            "num_hash_layers": 0,
            "n_hash_layers": 0,
            "hidden_act": "silu",
            "swiglu_limit": 10.0,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000,
            "compress_rope_theta": 40000,
            "rope_scaling": {
                "type": "yarn",
                "factor": 4,
                "original_max_position_embeddings": self.max_positions // 4,
                "beta_fast": 32,
                "beta_slow": 1,
            },
            "max_position_embeddings": self.max_positions,
            "window_size": self.window,
            "sliding_window": self.window,
            "compress_ratios": list(self.ratios),
            "kv_source_layer_ids": list(self.kv_sources),
            "index_source_layer_ids": list(self.index_sources),
            "candidate_source_layer_id": self.candidate_source,
            "candidate_topk_blocks": self.candidate_blocks,
            "candidate_block_size": self.candidate_block,
            "index_head_dim": self.index_dim,
            "index_n_heads": self.index_heads,
            "index_topk": self.index_topk,
            "hc_mult": self.hc_mult,
            "hc_sinkhorn_iters": 20,
            "hc_eps": 1e-6,
            "hc_pre_from_prev_sublayer": True,
            "q_head_norm": False,
            "tie_word_embeddings": False,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "vision_n_layers": 0,
            "engram_layer_ids": [self.engram_layer],
            "engram_max_ngram_size": self.engram_ngram,
            "engram_n_heads": self.engram_heads,
            "engram_head_dim": self.engram_head_dim,
            "engram_vocab_size": self.engram_vocab,
            "engram_pad_token_id": 2,
            "engram_compressed_vocab_size": self.vocab,
            "engram_num_embeddings": [engram_rows(self)],
            "dspark_block_size": self.draft_block,
            "dspark_markov_rank": self.markov_rank,
            "dspark_noise_token_id": 3,
            "dspark_target_layer_ids": list(self.draft_targets),
            "num_nextn_predict_layers": len(self.draft_targets),
            "bos_token_id": 0,
            "eos_token_id": 1,
            "quantization_config": {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "weight_block_size": [32, 32],
                "scale_fmt": "ue8m0",
            },
        }


def engram_rows(config: TinyConfig) -> int:
    """Rows of the Engram table: one sub-table per (n-gram size, head), each of the next unused prime size."""
    total, seen = 0, set[int]()
    for _ in range(config.engram_ngram - 1):
        size = config.engram_vocab - 1
        for _ in range(config.engram_heads):
            size += 1
            while size in seen or any(size % d == 0 for d in range(2, int(size**0.5) + 1)):
                size += 1
            seen.add(size)
            total += size
    return total
