"""The decoder of every family over explicit tensors: one forward pass for a flat batch of tokens of many sequences.

It knows nothing of sequences or pages: `attend` is handed each layer's queries, keys and values and returns the mix.
It is fit for capture in a CUDA graph if operations, linear layers, communicator and `attend` are.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace_worker.models.communicator import Communicator
from headrace_worker.models.decoder_weights import DecoderWeights, Layer, Mixture
from headrace_worker.models.experts import mix_experts
from headrace_worker.models.linear import Linear
from headrace_worker.models.operations import Attend, Operations, RowAdapters, Site
from headrace_worker.models.rotary import rotary_table


class Decoder:
    """One rank's part: `embed` (first pipeline stage), `run` (every stage), `logits` (last stage)."""

    def __init__(
        self,
        weights: DecoderWeights[Linear],
        operations: Operations,
        communicator: Communicator,
        *,
        context: int,
        device: torch.device,
    ) -> None:
        config, shard = weights.config, weights.shard
        self.config = config
        self.shard = shard
        self._weights = weights
        self._operations = operations
        self._communicator = communicator
        self._num_heads = len(shard.heads(config))
        self._num_rotated = self._num_heads + len(shard.kv_heads(config))
        self._first_token = shard.vocabulary(config).start
        # Rounded to the model's type, as when it was trained.
        dtype = torch.float32 if weights.embedding is None else weights.embedding.dtype
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=dtype).item()
        layer_ropes = [config.rope_of(layer) for layer in shard.layers(config)]
        ropes = list(dict.fromkeys(layer_ropes))
        self._tables = [rotary_table(rope, config.head_dim, context).to(device) for rope in ropes]
        self._table_of = [ropes.index(rope) for rope in layer_ropes]

    def embed(self, token_ids: Tensor) -> Tensor:
        """[tokens] int64 -> [tokens, hidden_size]"""
        embedding = self._weights.embedding
        assert embedding is not None, "only the first stage embeds"
        if self.shard.tp_size == 1:
            hidden = F.embedding(token_ids, embedding)
        else:
            own = token_ids - self._first_token
            elsewhere = (own < 0) | (own >= embedding.shape[0])
            hidden = F.embedding(own.masked_fill(elsewhere, 0), embedding)
            hidden = self._communicator.all_reduce(hidden.masked_fill(elsewhere.unsqueeze(-1), 0.0))
        return hidden if self._embedding_scale == 1.0 else hidden * self._embedding_scale

    def run(self, hidden: Tensor, positions: Tensor, attend: Attend, adapters: RowAdapters | None = None) -> Tensor:
        """This stage's layers: [tokens, hidden_size] -> [tokens, hidden_size], in place. positions: [tokens] int64.
        `adapters`: of a stage that is one rank."""
        operations, reduce = self._operations, self._communicator.all_reduce
        rotations = [table.index_select(0, positions) for table in self._tables]
        change: Tensor | None = None
        for index, layer in enumerate(self._weights.layers):
            norms = layer.norms
            if change is None:
                normed = operations.rms_norm(hidden, norms.before_attention)
            else:
                normed = operations.rms_norm(change, norms.before_attention, hidden)
            product = layer.qkv(normed)
            if adapters is not None:
                adapters.add(index, Site.QKV, normed, product)
            qkv = product.view(hidden.shape[0], -1, self.config.head_dim)
            operations.rotate(qkv, self._num_rotated, rotations[self._table_of[index]], layer.qk_norm)
            mixed = attend(index, qkv[:, : self._num_heads], qkv[:, self._num_heads :])
            product = layer.output(mixed)
            if adapters is not None:
                adapters.add(index, Site.OUTPUT, mixed, product)
            change = reduce(product)
            if norms.after_attention is not None:
                change = operations.rms_norm(change, norms.after_attention)
            normed = operations.rms_norm(change, norms.before_mlp, hidden)
            change = reduce(self._mlp(index, layer, normed, adapters))
            if norms.after_mlp is not None:
                change = operations.rms_norm(change, norms.after_mlp)
        return hidden if change is None else hidden.add_(change)

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden_size] -> [rows, vocab_size]"""
        head = self._weights.head
        assert head is not None, "only the last stage has logits"
        own = head(self.normalized(hidden))
        return self._communicator.all_gather(own)[:, : self.config.vocab_size]

    def normalized(self, hidden: Tensor) -> Tensor:
        """[rows, hidden_size] -> what the head is multiplied with; without the norm's weight, where that is multiplied
        into the head."""
        return self._operations.rms_norm(hidden, self._weights.norm)

    def _mlp(self, index: int, layer: Layer[Linear], rows: Tensor, adapters: RowAdapters | None) -> Tensor:
        act_mul = partial(self._operations.act_mul, activation=self.config.activation)
        if isinstance(layer.mlp, Mixture):
            assert self.config.mixture is not None
            return mix_experts(rows, layer.mlp, self.config.mixture, act_mul)
        gate_up = layer.mlp.gate_up(rows)
        if adapters is None:
            return layer.mlp.down(act_mul(gate_up))
        adapters.add(index, Site.GATE_UP, rows, gate_up)
        inner = act_mul(gate_up)
        product = layer.mlp.down(inner)
        adapters.add(index, Site.DOWN, inner, product)
        return product
