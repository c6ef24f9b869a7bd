"""The Llama family over explicit tensors: one forward pass for a flat batch of tokens of many sequences.

It knows nothing of sequences or pages: `attend` is handed each layer's queries, keys and values and returns the mix.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace_shared.errors import ConfigError
from headrace_worker.models.config import LlamaConfig
from headrace_worker.models.linear import Linear, make_linear
from headrace_worker.models.rotary import neighbours
from headrace_worker.models.weights import TensorSource

Attend = Callable[[int, Tensor, Tensor], Tensor]
"""(layer, queries [tokens, num_heads, head_dim], keys then values [tokens, 2 * num_kv_heads, head_dim]) -> [tokens,
num_heads * head_dim]. Writes the keys and values before it reads any."""


class Layer(NamedTuple):
    """The weights of the two norms are multiplied into the matrices that follow them."""

    qkv: Linear
    output: Linear
    gate_up: Linear
    down: Linear


class Llama:
    def __init__(self, config: LlamaConfig, embedding: Tensor, layers: list[Layer], head: Linear) -> None:
        self.config = config
        self.embedding = embedding
        self.layers = layers
        self.head = head

    def hidden_states(self, token_ids: Tensor, rotations: Tensor, attend: Attend) -> Tensor:
        """token_ids [tokens], rotations [tokens, 1, head_dim / 2] -> [tokens, hidden_size], before the last norm."""
        config = self.config
        num_rotated = config.num_heads + config.num_kv_heads
        num_heads_all = num_rotated + config.num_kv_heads
        epsilon = torch.full((1, 1), config.norm_epsilon, dtype=torch.float32, device=token_ids.device)
        hidden = F.embedding(token_ids, self.embedding)
        for index, layer in enumerate(self.layers):
            qkv = layer.qkv(_normalized(hidden, epsilon)).view(-1, num_heads_all, config.head_dim)
            _rotate(qkv[:, :num_rotated], rotations)
            mixed = attend(index, qkv[:, : config.num_heads], qkv[:, config.num_heads :])
            hidden = hidden + layer.output(mixed)
            gate_up = layer.gate_up(_normalized(hidden, epsilon))
            gate, up = gate_up.chunk(2, dim=-1)
            hidden = hidden + layer.down(F.silu(gate) * up)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden_size] -> [rows, vocab_size]"""
        epsilon = torch.full((1, 1), self.config.norm_epsilon, dtype=torch.float32, device=hidden.device)
        return self.head(_normalized(hidden, epsilon))


def _normalized(hidden: Tensor, epsilon: Tensor) -> Tensor:
    """RMSNorm without its weight (Zhang and Sennrich, 2019), in float32. On CPUs faster than F.rms_norm."""
    norm = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True, dtype=torch.float32)
    scale = torch.addcmul(epsilon, norm, norm, value=1.0 / hidden.shape[-1]).rsqrt_()
    return (hidden * scale).to(hidden.dtype)


def _rotate(heads: Tensor, rotations: Tensor) -> None:
    """Rotates [tokens, heads, head_dim] in place, in float32."""
    pairs = heads.float().view(*heads.shape[:-1], -1, 2)
    torch.view_as_complex(pairs).mul_(rotations)
    if heads.dtype != torch.float32:
        heads.copy_(pairs.flatten(-2))


def build_llama(
    config: LlamaConfig,
    source: TensorSource,
    *,
    dtype: torch.dtype,
    device: torch.device,
    report: Callable[[int, int], None],
) -> Llama:
    """Reads, fuses and packs the weights layer by layer, so that hardly more than the result is ever in memory."""
    reader = _Reader(config, source, dtype, device)
    layers = []
    for index in range(config.num_layers):
        report(index, config.num_layers)
        layers.append(reader.layer(f"model.layers.{index}."))
    report(config.num_layers, config.num_layers)
    embedding = reader.matrix("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
    head = (
        embedding if config.ties_embeddings else reader.matrix("lm_head.weight", config.vocab_size, config.hidden_size)
    )
    norm = reader.vector("model.norm.weight", config.hidden_size)
    return Llama(
        config,
        embedding.to(device=device, dtype=dtype),
        layers,
        make_linear((head * norm).to(device=device, dtype=dtype), None),
    )


class _Reader:
    """Checked float32 tensors of one checkpoint."""

    def __init__(self, config: LlamaConfig, source: TensorSource, dtype: torch.dtype, device: torch.device) -> None:
        self._config = config
        self._source = source
        self._dtype = dtype
        self._device = device

    def layer(self, prefix: str) -> Layer:
        config = self._config
        hidden, inner = config.hidden_size, config.intermediate_size
        q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        norm = self.vector(f"{prefix}input_layernorm.weight", hidden)
        attention = f"{prefix}self_attn."
        qkv = torch.cat(
            [
                neighbours(self.matrix(f"{attention}q_proj.weight", q_rows, hidden), config.head_dim),
                neighbours(self.matrix(f"{attention}k_proj.weight", kv_rows, hidden), config.head_dim),
                self.matrix(f"{attention}v_proj.weight", kv_rows, hidden),
            ]
        )
        qkv_bias = output_bias = gate_up_bias = down_bias = None
        if config.has_attention_bias:
            qkv_bias = torch.cat(
                [
                    neighbours(self.vector(f"{attention}q_proj.bias", q_rows), config.head_dim),
                    neighbours(self.vector(f"{attention}k_proj.bias", kv_rows), config.head_dim),
                    self.vector(f"{attention}v_proj.bias", kv_rows),
                ]
            )
            output_bias = self.vector(f"{attention}o_proj.bias", hidden)
        mlp = f"{prefix}mlp."
        post_norm = self.vector(f"{prefix}post_attention_layernorm.weight", hidden)
        gate_up = torch.cat([self.matrix(f"{mlp}{part}_proj.weight", inner, hidden) for part in ("gate", "up")])
        if config.has_mlp_bias:
            gate_up_bias = torch.cat([self.vector(f"{mlp}{part}_proj.bias", inner) for part in ("gate", "up")])
            down_bias = self.vector(f"{mlp}down_proj.bias", hidden)
        return Layer(
            qkv=self._linear(qkv * norm, qkv_bias),
            output=self._linear(self.matrix(f"{attention}o_proj.weight", hidden, q_rows), output_bias),
            gate_up=self._linear(gate_up * post_norm, gate_up_bias),
            down=self._linear(self.matrix(f"{mlp}down_proj.weight", hidden, inner), down_bias),
        )

    def matrix(self, name: str, num_rows: int, num_columns: int) -> Tensor:
        return self._read(name, (num_rows, num_columns))

    def vector(self, name: str, size: int) -> Tensor:
        return self._read(name, (size,))

    def _read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self._source:
            raise ConfigError("model", f"the checkpoint lacks {name}")
        tensor = self._source.get(name)
        if tuple(tensor.shape) != shape:
            raise ConfigError("model", f"{name} has the shape {tuple(tensor.shape)}, not {shape}")
        return tensor.to(torch.float32)

    def _linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        placed = weight.to(device=self._device, dtype=self._dtype)
        return make_linear(placed, None if bias is None else bias.to(device=self._device, dtype=self._dtype))
