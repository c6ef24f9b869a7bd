"""How much memory weights take, whatever they are packed into. Pure."""

from collections.abc import Callable
from typing import NamedTuple

from headrace_worker.models.config import ModelConfig

WeightBits = Callable[[int, int], float | None]
"""(outputs, inputs) -> bits of a weight of such a matrix, its share of the scales included. None: those of the model's
type."""


class Matrix(NamedTuple):
    num_outputs: int
    num_inputs: int
    number: int

    @property
    def num_weights(self) -> int:
        return self.num_outputs * self.num_inputs * self.number


def matrices(config: ModelConfig) -> list[Matrix]:
    """What a whole decoder without a mixture of experts multiplies with: of each layer those of queries, keys and
    values, of attention's output, of gate and up, and of down; last the head."""
    hidden, inner, layers = config.hidden_size, config.intermediate_size, config.num_layers
    queries = config.num_heads * config.head_dim
    return [
        Matrix(queries + 2 * config.num_kv_heads * config.head_dim, hidden, layers),
        Matrix(hidden, queries, layers),
        Matrix(2 * inner, hidden, layers),
        Matrix(hidden, inner, layers),
        Matrix(config.vocab_size, hidden, 1),
    ]


def packed_bytes(config: ModelConfig, element_size: int, bits: WeightBits) -> int:
    """Of all weights. A tied head is packed into a matrix of its own, so the embedding is there beside it.
    `element_size`: bytes of the model's type, which embedding, norms and biases keep."""
    packed = matrices(config)
    taken = sum(matrix.num_weights for matrix in packed)
    if config.ties_embeddings:
        taken -= packed[-1].num_weights
    total = float((config.num_parameters - taken) * element_size)
    for matrix in packed:
        each = bits(matrix.num_outputs, matrix.num_inputs)
        total += matrix.num_weights * (element_size if each is None else each / 8)
    return int(total)
