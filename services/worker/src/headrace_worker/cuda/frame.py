"""What every iteration sends to the device: all its small arrays in one piece, at places that never change.

One upload instead of a dozen, and recorded work (CUDA graphs) finds its inputs where they were when it was recorded.
"""

from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = TypeVar("Array")

_ALIGNMENT_WORDS = 4
"""16 bytes: what kernels assume of pointers, so that they are not compiled once more for another alignment."""
_WORD_BYTES = 4


class Frame(NamedTuple, Generic[Array]):
    """T tokens in all, S sequences. Sequences with one token come first, so that row i is sequence i there."""

    token_ids: Array
    """int64 [T]"""
    positions: Array
    """int64 [T]"""
    kv_slots: Array
    """int64 [T]: block * block_size + position within the block, where a token's keys and values go."""
    sources: Array
    """int64 [S]: the place whose last drawn token the row is fed with; the null place: `token_ids` has it."""
    places: Array
    """int64 [S]: whose block table is whose."""
    query_starts: Array
    """int32 [S + 1]: each sequence's first row, then the number of rows."""
    context_lengths: Array
    """int32 [S]: positions up to and with the last one computed here."""
    sampled_rows: Array
    """int64 [S]: the rows that logits are wanted of. This and what follows: in the order of the sampled slices."""
    sampled_places: Array
    """int64 [S]: where the drawn tokens are kept for the next iteration."""
    temperatures: Array
    """float32 [S]; 0: greedy."""
    top_ks: Array
    """int32 [S]; 0: all."""
    top_ps: Array
    """float32 [S]"""
    min_ps: Array
    """float32 [S]"""
    keys: Array
    """int64 [S]: see `noise.noise_keys`."""


_DTYPES: Frame[str] = Frame(
    token_ids="int64",
    positions="int64",
    kv_slots="int64",
    sources="int64",
    places="int64",
    query_starts="int32",
    context_lengths="int32",
    sampled_rows="int64",
    sampled_places="int64",
    temperatures="float32",
    top_ks="int32",
    top_ps="float32",
    min_ps="float32",
    keys="int64",
)
_PER_TOKEN = ("token_ids", "positions", "kv_slots")


class FrameLayout:
    """Where each array of at most `num_tokens` tokens and `num_sequences` sequences lies in a buffer of int32 words."""

    def __init__(self, num_tokens: int, num_sequences: int) -> None:
        self.num_tokens = num_tokens
        self.num_sequences = num_sequences
        self._ranges: list[tuple[int, int]] = []
        end = 0
        for name, dtype in zip(Frame._fields, _DTYPES, strict=True):
            length = num_tokens if name in _PER_TOKEN else num_sequences + (name == "query_starts")
            start, end = end, end + length * np.dtype(dtype).itemsize // _WORD_BYTES
            self._ranges.append((start, end))
            end += -end % _ALIGNMENT_WORDS
        self.num_words = end

    def arrays(self, words: NDArray[np.int32]) -> Frame[NDArray[Any]]:
        """Views of a buffer of the host."""
        return Frame(*(words[start:end].view(dtype) for (start, end), dtype in zip(self._ranges, _DTYPES, strict=True)))

    def tensors(self, words: Tensor) -> Frame[Tensor]:
        """Views of a buffer of the device."""
        return Frame(
            *(
                words[start:end].view(getattr(torch, dtype))
                for (start, end), dtype in zip(self._ranges, _DTYPES, strict=True)
            )
        )
