"""Random numbers of `headrace_worker.noise` and clocks of `headrace_worker.race`: on the device, bit for bit."""

import triton.language as tl

from headrace_worker.kernels.jit import jit
from headrace_worker.race import CHUNK, TOKENS

CHUNK_WIDTH: tl.constexpr = tl.constexpr(CHUNK)
"""Tokens of a chunk."""
FIRST_TOKEN_CLOCK: tl.constexpr = tl.constexpr(TOKENS)


@jit
def noise_key(seed, choice, position):
    """Scalars -> uint64: Philox4x32-10 (Salmon et al., 2011) of the counter (position, choice, 0, 0)."""
    counter = position.to(tl.uint32)
    zero = counter * 0
    low, high, _, _ = tl.philox(seed, counter, choice.to(tl.uint32), zero, zero)
    return (high.to(tl.uint64) << 32) | low.to(tl.uint64)


@jit
def clock(key, numbers):
    """The numbers-th elements (int64) of the key's sequence (SplitMix64, Steele et al., 2014), in (0, 1): float64."""
    step = tl.full(numbers.shape, 0x9E3779B97F4A7C15, tl.uint64)
    mixed = key + (numbers + 1).to(tl.uint64) * step
    mixed = (mixed ^ (mixed >> 30)) * tl.full(numbers.shape, 0xBF58476D1CE4E5B9, tl.uint64)
    mixed = (mixed ^ (mixed >> 27)) * tl.full(numbers.shape, 0x94D049BB133111EB, tl.uint64)
    mixed = (mixed ^ (mixed >> 31)) >> 12
    return (mixed.to(tl.int64).to(tl.float64) + 0.5) * 2.220446049250313e-16


@jit
def first_to_ring(rates, key, numbers):
    """rates [n] float64 >= 0, their clocks' numbers [n] -> (when the first rings, its index; inf: none has a rate)."""
    times = -tl.log(clock(key, numbers)) / rates
    when, index = tl.min(times, axis=0, return_indices=True)
    return when, index
