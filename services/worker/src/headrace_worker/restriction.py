"""Tokens that a client allows or forbids, as a mask beside those of grammars."""

from collections.abc import Sequence
from copy import copy

import numpy as np
from numpy.typing import NDArray

from headrace_shared.codec import unpack_ids
from headrace_shared.messages import Admission, SamplingParams

WORD_BITS = 32


class Restriction:
    """Where one sequence stands. `record` every token drawn for it. The router sees to it that some token always
    remains."""

    problem: None = None
    is_ready = True

    def __init__(self, params: SamplingParams, output: Sequence[int], vocab_size: int) -> None:
        allowed = np.ones(-(-vocab_size // WORD_BITS) * WORD_BITS, dtype=np.bool_)
        if params.allowed_token_ids:
            allowed[:] = False
            ids = np.asarray(unpack_ids(params.allowed_token_ids), dtype=np.int64)
            allowed[ids[ids < vocab_size]] = True
        for word in params.bad_words:
            if len(word) == 1:
                allowed[word[0]] = False
        self._words = np.packbits(allowed, bitorder="little").view(np.int32)
        self._longer = [word for word in params.bad_words if len(word) > 1]
        self._longest = max(map(len, self._longer), default=1)
        self._tail = tuple(output[-self._longest + 1 :]) if self._longer else ()

    def wait(self) -> bool:
        return True

    def abandon(self) -> None:
        """Nothing is under way."""

    @property
    def words(self) -> NDArray[np.int32]:
        """int32 [ceil(vocab_size / 32)]: bit t % 32 of word t // 32 says whether token t may come next."""
        tail = self._tail
        banned = [word[-1] for word in self._longer if tail[1 - len(word) :] == word[:-1]]
        if not banned:
            return self._words
        words = self._words.copy()
        for token in banned:
            words.view(np.uint32)[token // WORD_BITS] &= np.uint32(~(1 << token % WORD_BITS) & 0xFFFFFFFF)
        return words

    def record(self, token: int) -> None:
        if self._longer:
            self._tail = (*self._tail, token)[1 - self._longest :]

    def copy(self) -> "Restriction":
        """One that goes on by itself."""
        return copy(self)


def restriction_of(admission: Admission, vocab_size: int) -> Restriction | None:
    """None: every token may come."""
    params = admission.request.sampling
    if not params.allowed_token_ids and not params.bad_words:
        return None
    return Restriction(params, unpack_ids(admission.output).tolist(), vocab_size)
