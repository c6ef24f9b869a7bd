"""Changes to single logits: repetition, presence and frequency penalties, and bias."""

from collections.abc import Iterable
from copy import copy

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace_shared.codec import unpack_ids
from headrace_shared.messages import Admission, SamplingParams


class Penalties:
    """Counts the tokens of one sequence. Touches only the logits of tokens that were seen or are biased."""

    def __init__(self, params: SamplingParams, prompt: Iterable[int], output: Iterable[int], vocab_size: int) -> None:
        self._params = params
        repeats = params.repetition_penalty != 1.0
        seen = np.unique(np.fromiter(prompt if repeats else (), np.int64))
        self._counts: dict[int, int] = dict.fromkeys(seen[seen < vocab_size].tolist(), 0)
        """Token -> times in the output; with a repetition penalty also the prompt's, with 0."""
        bias = {token: value for token, value in params.logit_bias.items() if token < vocab_size}
        self._biased = np.fromiter(bias.keys(), np.int64, len(bias))
        self._bias = np.fromiter(bias.values(), np.float32, len(bias))
        for token in output:
            self.record(token)

    @classmethod
    def for_admission(cls, admission: Admission, vocab_size: int) -> "Penalties | None":
        """None where the sampling parameters change no logit."""
        params = admission.request.sampling
        if not penalizes(params) and not params.logit_bias:
            return None
        return cls(params, unpack_ids(admission.request.prompt), unpack_ids(admission.output), vocab_size)

    def copy(self) -> "Penalties":
        """One that counts on its own."""
        other = copy(self)
        other._counts = dict(self._counts)
        return other

    def record(self, token: int) -> None:
        if penalizes(self._params):
            self._counts[token] = self._counts.get(token, 0) + 1

    def apply(self, scores: Tensor) -> None:
        """scores [vocab_size], float32, changed in place."""
        if self._counts:
            ids = _tensor(np.fromiter(self._counts.keys(), np.int64, len(self._counts)), scores)
            counts = _tensor(np.fromiter(self._counts.values(), np.float32, len(self._counts)), scores)
            values = scores[ids]
            penalty = self._params.repetition_penalty
            if penalty != 1.0:
                values = torch.where(values > 0, values / penalty, values * penalty)
            values -= self._params.frequency_penalty * counts + self._params.presence_penalty * (counts > 0)
            scores[ids] = values
        if self._biased.size:
            scores.index_add_(0, _tensor(self._biased, scores), _tensor(self._bias, scores))


def penalizes(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


def _tensor(values: NDArray[np.int64] | NDArray[np.float32], like: Tensor) -> Tensor:
    return torch.from_numpy(values).to(like.device)
