"""Draws one token a row by weight, so that equal noise gives equal tokens although the weights were rounded otherwise.

Each chunk of tokens has an exponential clock of its own, with its weight as the rate, and the first to ring wins; then
the tokens of that chunk race. That is the Gumbel-max trick (Maddison et al., 2014) in two levels, which makes it cheap:
a change of the weights by a small fraction changes the winner with a probability of about that fraction. To walk the
cumulative weights would do as well, were it not that every boundary between two tokens moves with the weights before
it: a flat distribution would multiply the fraction by its number of tokens.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 128
"""Columns that are reduced together, in the two-level arg-max and in the two-level race."""
TOKENS = 1 << 32
"""The first clock of a token; those before belong to chunks."""
# SplitMix64 (Steele et al., 2014), in the signed integers that torch has.
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX = ((30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64)))


def race(weights: Tensor, keys: Tensor) -> Tensor:
    """weights [rows, vocab_size] >= 0, some of each row above 0; keys [rows] int64 -> token ids [rows]."""
    chunks = _chunked(weights)
    chunk = _first(chunk_sums(weights), keys, torch.zeros_like(keys))
    inner = chunks[torch.arange(keys.shape[0], device=keys.device), chunk]
    return chunk * CHUNK + _first(inner.double(), keys, TOKENS + chunk * CHUNK)


def _first(rates: Tensor, keys: Tensor, start: Tensor) -> Tensor:
    """Which clock of each row rings first: rates [rows, clocks], numbered from start [rows] on -> [rows]."""
    numbers = start[:, None] + torch.arange(rates.shape[-1], device=rates.device)
    return (-clocks(keys[:, None], numbers).log() / rates).argmin(-1)


def clocks(keys: Tensor, numbers: Tensor) -> Tensor:
    """The numbers-th element of the sequence of each key, in (0, 1): int64 -> float64."""
    mixed = keys + (numbers + 1) * _STEP
    for shift, factor in _MIX:
        mixed = (mixed ^ _shifted(mixed, shift)) * factor
    return (_shifted(mixed ^ _shifted(mixed, 31), 12).double() + 0.5) * 2.0**-52


def chunk_sums(weights: Tensor) -> Tensor:
    return _chunked(weights).sum(-1).double()


def _chunked(weights: Tensor) -> Tensor:
    """[rows, chunks, CHUNK], padded with zeros."""
    missing = -weights.shape[-1] % CHUNK
    return (F.pad(weights, (0, missing)) if missing else weights).view(weights.shape[0], -1, CHUNK)


def _shifted(values: Tensor, count: int) -> Tensor:
    """To the right, filled with zeros."""
    return (values >> count) & ((1 << (64 - count)) - 1)
