"""The Llama family over explicit tensors: one forward pass for a flat batch of tokens of many sequences.

It knows nothing of sequences or pages: `attend` is handed each layer's queries, keys and values and returns the mix.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace_worker.models.linear import Linear
from headrace_worker.models.llama_weights import LlamaWeights

Attend = Callable[[int, Tensor, Tensor], Tensor]
"""(layer, queries [tokens, num_heads, head_dim], keys then values [tokens, 2 * num_kv_heads, head_dim]) -> [tokens,
num_heads * head_dim]. Writes the keys and values before it reads any."""


class Llama:
    def __init__(self, weights: LlamaWeights[Linear]) -> None:
        self.config = weights.config
        self.embedding = weights.embedding
        self.layers = weights.layers
        self.head = weights.head

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
