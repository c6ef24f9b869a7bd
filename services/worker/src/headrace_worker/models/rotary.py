"""Rotary position embedding (Su et al., 2021) as one complex multiplication.

Checkpoints keep the two halves of a head apart: component i rotates with component i + head_dim / 2. Here the rows of
the query and key weights are reordered once so that the pairs are neighbours, which is the memory layout of complex
numbers. Scores do not change, since queries and keys are reordered alike.
"""

import math

import torch
from torch import Tensor

from headrace_worker.models.config import Rope, RopeScaling


def rotary_table(rope: Rope, head_dim: int, num_positions: int) -> Tensor:
    """[num_positions, head_dim / 2] complex64: the rotation of each pair at each position. With yarn, not of length 1:
    it multiplies queries and keys as well."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.factors:
        frequencies = frequencies / torch.tensor(rope.factors, dtype=torch.float32)
    length = 1.0
    if rope.scaling is not None:
        frequencies = _scaled(frequencies, rope.scaling, rope.theta)
        length = rope.scaling.attention_factor
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies[None, :]
    return torch.complex(angles.cos() * length, angles.sin() * length)


def _scaled(frequencies: Tensor, scaling: RopeScaling, theta: float) -> Tensor:
    slow = frequencies / scaling.factor
    if scaling.kind == "linear":
        return slow
    kept = _kept_by_yarn(frequencies, scaling, theta) if scaling.kind == "yarn" else _kept(frequencies, scaling)
    return (1 - kept) * slow + kept * frequencies


def _kept(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3: long wavelengths are stretched, short ones kept, and those between interpolated."""
    turns = scaling.original_context * frequencies / (2 * math.pi)
    span = scaling.high_frequency_factor - scaling.low_frequency_factor
    return ((turns - scaling.low_frequency_factor) / span).clamp(0.0, 1.0)


def _kept_by_yarn(frequencies: Tensor, scaling: RopeScaling, theta: float) -> Tensor:
    """Peng et al., 2023: as above, but the ramp is linear in the number of the pair."""
    num_pairs = frequencies.shape[0]

    def pair_that_turns(times: float) -> float:
        return num_pairs * math.log(scaling.original_context / (times * 2 * math.pi)) / math.log(theta)

    first, last = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.rounds_range:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * num_pairs - 1)
    # The small number as in the authors' code: a ramp must have some length.
    span = last - first or 0.001
    return 1 - ((torch.arange(num_pairs, dtype=torch.float32) - first) / span).clamp(0.0, 1.0)


def neighbours(rows: Tensor, head_dim: int) -> Tensor:
    """Reorders the rows of a query or key weight (or bias), head by head, from halves to neighbouring pairs."""
    heads = rows.reshape(-1, 2, head_dim // 2, *rows.shape[1:])
    return heads.transpose(1, 2).reshape(rows.shape)
