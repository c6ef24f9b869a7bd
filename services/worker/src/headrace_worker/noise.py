"""Random numbers that are a pure function of (seed, choice, position): Philox4x32-10 (Salmon et al., 2011).

No generator state exists, so a sequence draws the same numbers in any batch, after preemption, and on another worker.
"""

import numpy as np
from numpy.typing import NDArray

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW_WORD = np.uint64(0xFFFFFFFF)
_WORD_BITS = np.uint64(32)
_ROUNDS = 10


def noise_keys(
    seeds: NDArray[np.uint64], choices: NDArray[np.uint64], positions: NDArray[np.uint64]
) -> NDArray[np.int64]:
    """64 bits for each (seed, choice, position); all arrays have the same length."""
    zeros = np.zeros_like(positions)
    words = philox(np.stack([positions, choices, zeros, zeros]), np.stack([seeds & _LOW_WORD, seeds >> _WORD_BITS]))
    keys: NDArray[np.int64] = ((words[1] << _WORD_BITS) | words[0]).view(np.int64)
    return keys


def philox(counter: NDArray[np.uint64], key: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """counter [4, n], key [2, n] -> [4, n]; 32-bit words kept in 64-bit integers."""
    c0, c1, c2, c3 = counter & _LOW_WORD
    k0, k1 = key & _LOW_WORD
    for _ in range(_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (product1 >> _WORD_BITS) ^ c1 ^ k0,
            product1 & _LOW_WORD,
            (product0 >> _WORD_BITS) ^ c3 ^ k1,
            product0 & _LOW_WORD,
        )
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW_WORD, (k1 + _KEY_STEPS[1]) & _LOW_WORD
    return np.stack([c0, c1, c2, c3])
