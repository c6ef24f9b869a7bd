"""The model that is measured: Llama-3.1-8B's shape with random weights, or a tiny one where there is no GPU."""

from collections.abc import Iterator

import torch
from torch import Tensor

from headrace_shared.fleet_messages import ModelCard
from headrace_worker.models.config import ModelConfig
from headrace_worker.models.hf_config import config_from_hf

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
TINY = LLAMA_8B | {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}


def raw_config(tiny: bool) -> dict[str, object]:
    return dict(TINY if tiny else LLAMA_8B)


def model_config(tiny: bool) -> ModelConfig:
    return config_from_hf(raw_config(tiny))


def card(context: int, vocab_size: int) -> ModelCard:
    return ModelCard(
        model="random", tokenizer=b"{}", vocab_size=vocab_size, context=context, eos_token_ids=(), created=0
    )


class RandomWeights:
    """A `TensorSource` that makes each tensor on the device when it is read; equal names give equal tensors."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self._device = device
        self._shapes = dict(_shapes(config))

    def names(self) -> list[str]:
        return list(self._shapes)

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def read(self, name: str, rows: range | None = None, columns: range | None = None) -> Tensor:
        seed = sum((index + 1) * byte for index, byte in enumerate(name.encode()))
        generator = torch.Generator(self._device).manual_seed(seed + (rows.start if rows else 0))
        whole = self._shapes[name]
        shape = (len(rows), *whole[1:]) if rows is not None else whole
        if "norm" in name:
            return torch.ones(shape, device=self._device)
        values = torch.empty(shape, dtype=torch.bfloat16, device=self._device)
        values.normal_(0.0, whole[-1] ** -0.5, generator=generator)
        return values if columns is None else values[:, columns.start : columns.stop]


def _shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    yield "model.embed_tokens.weight", (config.vocab_size, hidden)
    yield "lm_head.weight", (config.vocab_size, hidden)
    yield "model.norm.weight", (hidden,)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        yield f"{prefix}input_layernorm.weight", (hidden,)
        yield f"{prefix}post_attention_layernorm.weight", (hidden,)
        yield f"{prefix}self_attn.q_proj.weight", (q_rows, hidden)
        yield f"{prefix}self_attn.k_proj.weight", (kv_rows, hidden)
        yield f"{prefix}self_attn.v_proj.weight", (kv_rows, hidden)
        yield f"{prefix}self_attn.o_proj.weight", (hidden, q_rows)
        yield f"{prefix}mlp.gate_proj.weight", (inner, hidden)
        yield f"{prefix}mlp.up_proj.weight", (inner, hidden)
        yield f"{prefix}mlp.down_proj.weight", (hidden, inner)
