"""Reads a checkpoint into a decoder's weights: checked, cut to the rank's shard, fused, and packed, layer by layer, so
that hardly more than the result is ever in memory."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Generic

import torch
from torch import Tensor

from headrace_worker.models.config import ModelConfig
from headrace_worker.models.decoder_weights import (
    DecoderWeights,
    Layer,
    LayerNorms,
    Mixture,
    Mlp,
    Packed,
    Packing,
)
from headrace_worker.models.experts import check_alignment
from headrace_worker.models.operations import QkNorm
from headrace_worker.models.rotary import neighbours
from headrace_worker.models.shard import WHOLE, Shard
from headrace_worker.models.tensor_reader import TensorReader
from headrace_worker.models.weights import TensorSource


def read_decoder(
    config: ModelConfig,
    source: TensorSource,
    packing: Packing[Packed],
    *,
    shard: Shard = WHOLE,
    dtype: torch.dtype,
    device: torch.device,
    report: Callable[[int, int], None],
) -> DecoderWeights[Packed]:
    """Raises ConfigError, before anything is read, for a checkpoint that lacks a tensor or has one of another shape,
    and for a model that cannot be divided like this. `report`: layers done, layers in all."""
    shard.check(config)
    if config.mixture is not None:
        check_alignment(len(shard.inner(config)), config.hidden_size, dtype)
    check_weights(config, source, shard)
    reader = _DecoderReader(config, shard, TensorReader(source, dtype, device), packing)
    num_layers = len(shard.layers(config))
    layers: list[Layer[Packed]] = []
    report(0, num_layers)
    for layer in reader.layers():
        layers.append(layer)
        report(len(layers), num_layers)
    embedding, norm, head = reader.ends()
    return DecoderWeights(config, shard, embedding, layers, norm, head)


def check_weights(config: ModelConfig, source: TensorSource, shard: Shard = WHOLE) -> None:
    """Raises ConfigError if a tensor is missing or has another shape. The same walk as that of reading, but without
    reading and without memory: a wrong tensor at the end is not found after minutes, and nothing is taken for sizes
    that a file only claims."""
    checker = TensorReader(source, torch.float32, torch.device("meta"), only_checks=True)
    dry = _DecoderReader(config, shard, checker, _Unpacked())
    deque(dry.layers(), maxlen=0)
    dry.ends()


class _Unpacked:
    folds_norms = False

    def linear(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        return weight

    gate_up = linear


class _DecoderReader(Generic[Packed]):
    def __init__(self, config: ModelConfig, shard: Shard, reader: TensorReader, packing: Packing[Packed]) -> None:
        self._config = config
        self._shard = shard
        self._reader = reader
        self._packing = packing

    def layers(self) -> Iterator[Layer[Packed]]:
        """Of this pipeline stage."""
        for index in self._shard.layers(self._config):
            yield self._layer(f"model.layers.{index}.")

    def ends(self) -> tuple[Tensor | None, Tensor | None, Packed | None]:
        """The embedding, the last norm's weight, if it is not multiplied into the head, and the head, as far as they
        are in this pipeline stage."""
        config, shard = self._config, self._shard
        embedding = self._vocabulary("model.embed_tokens.weight") if shard.is_first else None
        if not shard.is_last:
            return embedding, None, None
        norm = self._norm("model.norm.weight")
        name = "model.embed_tokens.weight" if config.ties_embeddings else "lm_head.weight"
        if self._packing.folds_norms:
            return embedding, None, self._packing.linear(self._vocabulary(name, norm), None)
        # The same memory twice, where the packing leaves weights as they are.
        weight = embedding if embedding is not None and config.ties_embeddings else self._vocabulary(name)
        return embedding, norm, self._packing.linear(weight, None)

    def _layer(self, prefix: str) -> Layer[Packed]:
        config = self._config
        norm = self._norm(f"{prefix}input_layernorm.weight")
        after_attention = after_mlp = None
        before_mlp = "post_attention_layernorm"
        if config.has_sandwich_norms:
            after_attention = self._norm(f"{prefix}post_attention_layernorm.weight")
            after_mlp = self._norm(f"{prefix}post_feedforward_layernorm.weight")
            before_mlp = "pre_feedforward_layernorm"
        mlp_norm = self._norm(f"{prefix}{before_mlp}.weight")
        folds = self._packing.folds_norms
        qkv, output = self._attention(f"{prefix}self_attn.", norm if folds else None)
        mlp: Mlp[Packed] | Mixture
        if config.mixture is None:
            mlp = self._mlp(f"{prefix}mlp.", mlp_norm if folds else None)
        else:
            mlp = self._mixture(prefix, config.mixture.num_experts)
        norms = LayerNorms(
            before_attention=None if folds else norm,
            after_attention=after_attention,
            before_mlp=None if folds and config.mixture is None else mlp_norm,
            after_mlp=after_mlp,
        )
        return Layer(qkv, output, mlp, norms, self._qk_norm(f"{prefix}self_attn.") if config.has_qk_norm else None)

    def _attention(self, prefix: str, norm: Tensor | None) -> tuple[Packed, Packed]:
        config, shard, reader = self._config, self._shard, self._reader
        hidden = config.hidden_size
        all_q, all_kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        q_rows = _spread(shard.heads(config), config.head_dim)
        kv_rows = _spread(shard.kv_heads(config), config.head_dim)
        parts = (("q", all_q, q_rows), ("k", all_kv, kv_rows), ("v", all_kv, kv_rows))
        weight = reader.empty(len(q_rows) + 2 * len(kv_rows), hidden)
        bias = reader.empty(weight.shape[0]) if config.has_qkv_bias else None
        start = 0
        for name, num_rows, rows in parts:
            place = slice(start, start + len(rows))
            rotated = None if name == "v" else config.head_dim
            shape = (num_rows, hidden)
            reader.fill(weight[place], f"{prefix}{name}_proj.weight", shape, rows=rows, norm=norm, rotated=rotated)
            if bias is not None:
                reader.fill(bias[place], f"{prefix}{name}_proj.bias", (num_rows,), rows=rows, rotated=rotated)
            start = place.stop
        output = reader.empty(hidden, len(q_rows))
        reader.fill(output, f"{prefix}o_proj.weight", (hidden, all_q), columns=q_rows)
        output_bias = self._row_parallel_bias(f"{prefix}o_proj.bias") if config.has_output_bias else None
        return self._packing.linear(weight, bias), self._packing.linear(output, output_bias)

    def _mlp(self, prefix: str, norm: Tensor | None) -> Mlp[Packed]:
        config, reader = self._config, self._reader
        inner = self._shard.inner(config)
        names = [f"{prefix}gate_proj", f"{prefix}up_proj"]
        gate_up = self._gate_up(names, inner, norm)
        bias = down_bias = None
        if config.has_mlp_bias:
            bias = reader.empty(2 * len(inner))
            for half, name in zip(bias.chunk(2), names, strict=True):
                reader.fill(half, f"{name}.bias", (config.intermediate_size,), rows=inner)
            down_bias = self._row_parallel_bias(f"{prefix}down_proj.bias")
        down = reader.empty(config.hidden_size, len(inner))
        reader.fill(down, f"{prefix}down_proj.weight", (config.hidden_size, config.intermediate_size), columns=inner)
        return Mlp(self._packing.gate_up(gate_up, bias), self._packing.linear(down, down_bias))

    def _gate_up(self, names: Sequence[str], inner: range, norm: Tensor | None, out: Tensor | None = None) -> Tensor:
        config, reader = self._config, self._reader
        weight = reader.empty(2 * len(inner), config.hidden_size) if out is None else out
        for half, name in zip(weight.chunk(2), names, strict=True):
            shape = (config.intermediate_size, config.hidden_size)
            reader.fill(half, f"{name}.weight", shape, rows=inner, norm=norm)
        return weight

    def _mixture(self, prefix: str, num_experts: int) -> Mixture:
        config, reader = self._config, self._reader
        inner = self._shard.inner(config)
        # Mixtral's names, or Qwen's.
        if f"{prefix}block_sparse_moe.gate.weight" in reader:
            block, gate, up, down_name = f"{prefix}block_sparse_moe.", "w1", "w3", "w2"
        else:
            block, gate, up, down_name = f"{prefix}mlp.", "gate_proj", "up_proj", "down_proj"
        router = reader.empty(num_experts, config.hidden_size)
        reader.fill(router, f"{block}gate.weight", (num_experts, config.hidden_size))
        gate_up = reader.empty(num_experts, 2 * len(inner), config.hidden_size)
        down = reader.empty(num_experts, config.hidden_size, len(inner))
        for index in range(num_experts):
            expert = f"{block}experts.{index}."
            self._gate_up([f"{expert}{gate}", f"{expert}{up}"], inner, None, gate_up[index])
            shape = (config.hidden_size, config.intermediate_size)
            reader.fill(down[index], f"{expert}{down_name}.weight", shape, columns=inner)
        return Mixture(router, gate_up, down)

    def _qk_norm(self, prefix: str) -> QkNorm:
        config = self._config
        queries, keys = (
            neighbours(self._norm(f"{prefix}{name}_norm.weight", config.head_dim), config.head_dim) for name in "qk"
        )
        return QkNorm(queries, keys, len(self._shard.heads(config)))

    def _norm(self, name: str, size: int | None = None) -> Tensor:
        return self._reader.norm(name, size or self._config.hidden_size, self._config.norm_offset)

    def _row_parallel_bias(self, name: str) -> Tensor | None:
        """The ranks' products are added up, so one of them brings the bias."""
        if self._shard.tp_rank:
            return None
        bias = self._reader.empty(self._config.hidden_size)
        self._reader.fill(bias, name, (self._config.hidden_size,))
        return bias

    def _vocabulary(self, name: str, norm: Tensor | None = None) -> Tensor:
        """The shard's rows of a matrix with one row for each token; zero beyond the vocabulary."""
        config = self._config
        tokens = self._shard.vocabulary(config)
        rows = range(min(tokens.start, config.vocab_size), min(tokens.stop, config.vocab_size))
        weight = self._reader.empty(len(tokens), config.hidden_size)
        weight[len(rows) :] = 0
        shape = (config.vocab_size, config.hidden_size)
        self._reader.fill(weight[: len(rows)], name, shape, rows=rows, norm=norm)
        return weight


def _spread(heads: range, head_dim: int) -> range:
    return range(heads.start * head_dim, heads.stop * head_dim)
