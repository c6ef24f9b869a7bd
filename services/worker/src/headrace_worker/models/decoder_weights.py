"""The weights of a decoder, as one rank holds them, in the form of whoever multiplies with them."""

from typing import Generic, NamedTuple, Protocol, TypeVar

from torch import Tensor

from headrace_worker.models.config import ModelConfig
from headrace_worker.models.operations import QkNorm
from headrace_worker.models.shard import Shard

Packed = TypeVar("Packed")
PackedOut = TypeVar("PackedOut", covariant=True)


class Packing(Protocol[PackedOut]):
    """Turns a weight [out, in] and a bias [out], in the model's type and place, into what multiplies fastest."""

    @property
    def folds_norms(self) -> bool:
        """Whether weights are to come with the weight of the norm before them multiplied into their columns. If not,
        the norm's weight is applied when it is computed."""
        ...

    def linear(self, weight: Tensor, bias: Tensor | None) -> PackedOut: ...

    def gate_up(self, weight: Tensor, bias: Tensor | None) -> PackedOut:
        """The rows of gate, then as many of up."""
        ...


class Mlp(NamedTuple, Generic[Packed]):
    gate_up: Packed
    down: Packed


class Mixture(NamedTuple):
    """A mixture of experts, in the model's type."""

    router: Tensor
    """[experts, hidden_size]"""
    gate_up: Tensor
    """[experts, 2 * inner, hidden_size]: the rows of gate, then of up."""
    down: Tensor
    """[experts, hidden_size, inner]"""


class LayerNorms(NamedTuple):
    """Weights [hidden_size], float32. Before: None where they are multiplied into what follows. After: None where the
    model has no such norm."""

    before_attention: Tensor | None
    after_attention: Tensor | None
    before_mlp: Tensor | None
    after_mlp: Tensor | None


class Layer(NamedTuple, Generic[Packed]):
    qkv: Packed
    """Rows of queries, keys and values. Queries and keys have rotated pairs as neighbours (see `rotary`)."""
    output: Packed
    mlp: Mlp[Packed] | Mixture
    norms: LayerNorms
    qk_norm: QkNorm | None


class DecoderWeights(NamedTuple, Generic[Packed]):
    config: ModelConfig
    shard: Shard
    embedding: Tensor | None
    """[tokens of the shard, hidden_size]. None: not in this pipeline stage."""
    layers: list[Layer[Packed]]
    """Of this pipeline stage."""
    norm: Tensor | None
    """Weight [hidden_size] of the last norm, float32. None: multiplied into the head, or not in this stage."""
    head: Packed | None
    """None: not in this pipeline stage."""
