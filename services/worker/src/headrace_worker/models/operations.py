"""What a decoder computes between its matrix products, as far as kernels can fuse it.

An implementation is made for one model (its norms share an epsilon). It must be fit for capture in a CUDA graph: no
synchronization with the host, and nothing in Python that depends on the tensors' contents.
"""

from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple, Protocol

from torch import Tensor

from headrace_worker.models.config import Activation

Attend = Callable[[int, Tensor, Tensor], Tensor]
"""(layer, counted from the stage's first; queries [tokens, num_heads, head_dim]; keys, then values [tokens, 2 *
num_kv_heads, head_dim]) -> [tokens, num_heads * head_dim]. Writes the keys and values to the cache before it reads any.
Both inputs are views of the same tensor: heads are contiguous, tokens are not."""


class Site(IntEnum):
    """One of a layer's four products."""

    QKV = 0
    OUTPUT = 1
    GATE_UP = 2
    DOWN = 3


class RowAdapters(Protocol):
    """What LoRA adapters add to the products of some of an iteration's rows."""

    def add(self, layer: int, site: Site, inputs: Tensor, outputs: Tensor) -> None:
        """Adds to `outputs` [tokens, out] in place what belongs to `inputs` [tokens, in]; rows without an adapter are
        not touched. `layer` counts from the stage's first."""
        ...


class QkNorm(NamedTuple):
    """Weights [head_dim], float32, in the order of rotated pairs, and how many of the heads are queries."""

    queries: Tensor
    keys: Tensor
    num_heads: int


class Operations(Protocol):
    def rms_norm(self, rows: Tensor, weight: Tensor | None, residual: Tensor | None = None) -> Tensor:
        """RMSNorm (Zhang and Sennrich, 2019) of [rows, n] in float32, with a float32 weight [n] or without one.

        With `residual` (like rows): adds rows to it in place and normalizes the sum."""
        ...

    def rotate(self, qkv: Tensor, num_rotated: int, rotations: Tensor, qk_norm: QkNorm | None) -> None:
        """Rotates the first heads of [tokens, heads, head_dim] in place, in float32, after normalizing each of them if
        there is a `qk_norm`. rotations: [tokens, head_dim / 2] complex64; pairs are neighbours."""
        ...

    def act_mul(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """[rows, 2 * n] -> activation(first half) * second half [rows, n]"""
        ...
