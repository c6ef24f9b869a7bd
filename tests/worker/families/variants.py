"""Tiny models of every family, with what is particular to it in use."""

from typing import Any

YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR: dict[str, Any] = {"rope_type": "linear", "factor": 4.0}


def rope(scaling: dict[str, Any], theta: float = 10000.0) -> dict[str, Any]:
    return {"rope_parameters": {**scaling, "rope_theta": theta}}


GEMMA: dict[str, Any] = {
    "family": "Gemma3",
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "sliding_window": 12,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}
GEMMA_ROPES: dict[str, Any] = {
    "rope_parameters": {
        "full_attention": {**LINEAR, "rope_theta": 500000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
    }
}
QWEN3_MOE: dict[str, Any] = {
    "family": "Qwen3Moe",
    "head_dim": 16,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "mlp_only_layers": [],
}

VARIANTS: dict[str, dict[str, Any]] = {
    "llama, tied": {"tie_word_embeddings": True},
    "llama, untied, biases": {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
    "llama, heads of their own size": {"head_dim": 16},
    "llama, multi-head": {"num_key_value_heads": 6},
    "llama, multi-query": {"num_key_value_heads": 1},
    "llama, llama3 scaling": rope(LLAMA3),
    "llama, linear scaling": rope(LINEAR, 5000.0),
    "llama, yarn": rope(YARN),
    "llama, yarn with factors of its own": rope(
        {**YARN, "attention_factor": 1.3, "beta_fast": 8.0, "beta_slow": 2.0, "truncate": False}
    ),
    "llama, yarn with mscale": rope({**YARN, "mscale": 0.7, "mscale_all_dim": 0.4}),
    "mistral": {"family": "Mistral", "sliding_window": None},
    "mistral, window": {"family": "Mistral", "sliding_window": 12},
    "qwen2": {"family": "Qwen2", "tie_word_embeddings": True},
    "qwen2, windows in later layers": {
        "family": "Qwen2",
        "use_sliding_window": True,
        "sliding_window": 9,
        "max_window_layers": 1,
    },
    "qwen3": {"family": "Qwen3", "head_dim": 16},
    "qwen3, biases, yarn": {"family": "Qwen3", "head_dim": 16, "attention_bias": True, **rope(YARN, 1000000.0)},
    "gemma3": {**GEMMA, **GEMMA_ROPES},
    "gemma3, untied": {**GEMMA, "tie_word_embeddings": False},
    "mixtral": {"family": "Mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 12},
    "qwen3 moe": {**QWEN3_MOE, "norm_topk_prob": True},
    "qwen3 moe, weights as they are": {**QWEN3_MOE, "norm_topk_prob": False, "tie_word_embeddings": True},
}
