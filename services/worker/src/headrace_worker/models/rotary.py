"""Rotary position embedding (Su et al., 2021) as one complex multiplication.

Checkpoints keep the two halves of a head apart: component i rotates with component i + head_dim / 2. Here the rows of
the query and key weights are reordered once so that the pairs are neighbours, which is the memory layout of complex
numbers. Scores do not change, since queries and keys are reordered alike.
"""

import math

import torch
from torch import Tensor

from headrace_worker.models.config import LlamaConfig, RopeScaling


def rotary_table(config: LlamaConfig, num_positions: int) -> Tensor:
    """[num_positions, head_dim / 2] complex64: the rotation of each pair at each position."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).to(torch.float32) / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    if config.rope_factors:
        frequencies = frequencies / torch.tensor(config.rope_factors, dtype=torch.float32)
    if config.rope_scaling is not None:
        frequencies = _scaled(frequencies, config.rope_scaling)
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies[None, :]
    return torch.complex(angles.cos(), angles.sin())


def _scaled(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    slow = frequencies / scaling.factor
    if scaling.kind == "linear":
        return slow
    # llama3: long wavelengths are stretched, short ones kept, and those between interpolated.
    turns = scaling.original_context * frequencies / (2 * math.pi)
    span = scaling.high_frequency_factor - scaling.low_frequency_factor
    kept = ((turns - scaling.low_frequency_factor) / span).clamp(0.0, 1.0)
    return (1 - kept) * slow + kept * frequencies


def neighbours(rows: Tensor, head_dim: int) -> Tensor:
    """Reorders the rows of a query or key weight (or bias), head by head, from halves to neighbouring pairs."""
    heads = rows.reshape(-1, 2, head_dim // 2, *rows.shape[1:])
    return heads.transpose(1, 2).reshape(rows.shape)
