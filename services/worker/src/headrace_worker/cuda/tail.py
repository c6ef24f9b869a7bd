"""The part of an upload whose arrays come and go: new block table entries, copies, changes to single logits."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNMENT_WORDS = 4


class Tail:
    """Arrays of one iteration, to be uploaded behind its frame. What is put in gets a number to take it out by."""

    def __init__(self) -> None:
        self._arrays: list[NDArray[Any]] = []
        self._ranges: list[tuple[int, int, torch.dtype]] = []
        self.num_words = 0

    def put(self, array: NDArray[Any]) -> int:
        """A contiguous array of int32, int64 or float32."""
        words = array.nbytes // 4
        dtype = {"i4": torch.int32, "i8": torch.int64, "f4": torch.float32}[array.dtype.str[1:]]
        self._arrays.append(array)
        self._ranges.append((self.num_words, self.num_words + words, dtype))
        self.num_words += words + -words % _ALIGNMENT_WORDS
        return len(self._arrays) - 1

    def write(self, words: NDArray[np.int32]) -> None:
        for array, (start, end, _) in zip(self._arrays, self._ranges, strict=True):
            words[start:end] = array.reshape(-1).view(np.int32)

    def tensors(self, words: Tensor) -> list[Tensor]:
        """By number, from the buffer that `write` filled, now on the device. One-dimensional."""
        return [words[start:end].view(dtype) for start, end, dtype in self._ranges]
