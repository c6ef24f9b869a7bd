"""Weights of the Llama family: read, checked, fused, and packed for whoever multiplies with them."""

from collections.abc import Callable
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from headrace_shared.errors import ConfigError
from headrace_worker.models.config import LlamaConfig
from headrace_worker.models.rotary import neighbours
from headrace_worker.models.weights import TensorSource

Packed = TypeVar("Packed")
PackedOut = TypeVar("PackedOut", covariant=True)


class Packing(Protocol[PackedOut]):
    """Turns a weight [out, in] and a bias [out], in the model's type and place, into what multiplies fastest."""

    def linear(self, weight: Tensor, bias: Tensor | None) -> PackedOut: ...

    def gate_up(self, weight: Tensor, bias: Tensor | None) -> PackedOut:
        """The rows of gate, then as many of up."""
        ...


class Layer(NamedTuple, Generic[Packed]):
    """The weights of the two norms are multiplied into the matrices that follow them."""

    qkv: Packed
    output: Packed
    gate_up: Packed
    down: Packed


class LlamaWeights(NamedTuple, Generic[Packed]):
    config: LlamaConfig
    embedding: Tensor
    """[vocab_size, hidden_size]"""
    layers: list[Layer[Packed]]
    head: Packed


def read_llama(
    config: LlamaConfig,
    source: TensorSource,
    packing: Packing[Packed],
    *,
    dtype: torch.dtype,
    device: torch.device,
    report: Callable[[int, int], None],
) -> LlamaWeights[Packed]:
    """Reads, fuses and packs the weights layer by layer, so that hardly more than the result is ever in memory."""
    reader = _Reader(config, source, packing, dtype, device)
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
    return LlamaWeights(config, embedding.to(device=device, dtype=dtype), layers, reader.packed(head * norm, None))


class _Reader(Generic[Packed]):
    """Checked float32 tensors of one checkpoint."""

    def __init__(
        self,
        config: LlamaConfig,
        source: TensorSource,
        packing: Packing[Packed],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._config = config
        self._source = source
        self._packing = packing
        self._dtype = dtype
        self._device = device

    def layer(self, prefix: str) -> Layer[Packed]:
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
            qkv=self.packed(qkv * norm, qkv_bias),
            output=self.packed(self.matrix(f"{attention}o_proj.weight", hidden, q_rows), output_bias),
            gate_up=self._packing.gate_up(self._placed(gate_up * post_norm), self._placed_bias(gate_up_bias)),
            down=self.packed(self.matrix(f"{mlp}down_proj.weight", hidden, inner), down_bias),
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

    def packed(self, weight: Tensor, bias: Tensor | None) -> Packed:
        return self._packing.linear(self._placed(weight), self._placed_bias(bias))

    def _placed(self, values: Tensor) -> Tensor:
        return values.to(device=self._device, dtype=self._dtype)

    def _placed_bias(self, values: Tensor | None) -> Tensor | None:
        return None if values is None else self._placed(values)
