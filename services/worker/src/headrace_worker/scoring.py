"""Log-probabilities of tokens that are known already: those of a prompt."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from headrace_shared.messages import SamplingParams, SequenceId, TokenLogprobs, TopLogprob
from headrace_worker.iteration import SampledToken, SequenceSlice
from headrace_worker.sampling import NOT_FINITE

ROWS_AT_ONCE = 16
"""What is computed from logits takes several times their memory."""


class Scores(NamedTuple):
    """Of some rows."""

    own: Tensor
    """float32 [rows]: of the targets. NaN where the logits are not finite."""
    likelier: Tensor
    """int64 [rows]: how many tokens are likelier."""
    top_ids: Tensor
    """int64 [rows, most]"""
    top_values: Tensor
    """float32 [rows, most]"""


class Targets(NamedTuple):
    """Of all slices of an iteration, in slice order."""

    tokens: NDArray[np.int64]
    sequence_ids: list[SequenceId]
    counts: list[int]
    """How many of the likeliest tokens are wanted beside each."""

    @property
    def most(self) -> int:
        return max(self.counts)

    def items(self, parts: Sequence[Scores]) -> list[SampledToken]:
        """`parts`: all scores, on the host."""
        items: list[SampledToken] = []
        for part in parts:
            rows = zip(*(values.tolist() for values in part), strict=True)
            for own, likelier, top_ids, top_values in rows:
                count = self.counts[len(items)]
                top = zip(top_ids[:count], top_values[:count], strict=True)
                logprobs = TokenLogprobs(own, tuple(TopLogprob(*pair) for pair in top), 1 + likelier)
                sequence_id, token = self.sequence_ids[len(items)], int(self.tokens[len(items)])
                problem = NOT_FINITE if own != own else None
                items.append(SampledToken(sequence_id, token, None if problem else logprobs, problem))
        return items


def targets_of(slices: Sequence[SequenceSlice], params_of: Callable[[SequenceId], SamplingParams]) -> Targets:
    """There must be some."""
    scored = [piece for piece in slices if piece.targets]
    return Targets(
        np.concatenate([np.asarray(piece.targets, dtype=np.int64) for piece in scored]),
        [piece.sequence_id for piece in scored for _ in piece.targets],
        [params_of(piece.sequence_id).num_prompt_logprobs or 0 for piece in scored for _ in piece.targets],
    )


def score(logits: Tensor, targets: Tensor, most: int) -> list[Scores]:
    """logits [rows, vocab_size] of any float type, targets [rows]; `most`: so many of the likeliest tokens. Waits for
    no device."""
    count = min(most, logits.shape[-1])
    parts = [slice(start, start + ROWS_AT_ONCE) for start in range(0, logits.shape[0], ROWS_AT_ONCE)]
    return [_score(logits[part], targets[part], count) for part in parts]


def merged(
    slices: Sequence[SequenceSlice], scored: Sequence[SampledToken], sampled: Sequence[SampledToken]
) -> list[SampledToken]:
    """All items of an iteration in slice order: see `iteration.Engine.collect`."""
    items: list[SampledToken] = []
    first_scored = first_sampled = 0
    for piece in slices:
        end_scored = first_scored + len(piece.targets)
        end_sampled = first_sampled + piece.num_rows - len(piece.targets)
        items += scored[first_scored:end_scored]
        items += sampled[first_sampled:end_sampled]
        first_scored, first_sampled = end_scored, end_sampled
    return items


def _score(logits: Tensor, targets: Tensor, most: int) -> Scores:
    logprobs = F.log_softmax(logits.float(), dim=-1)
    own = logprobs.gather(-1, targets[:, None])
    likelier = (logprobs > own).sum(-1)
    values, ids = logprobs.topk(most, dim=-1)
    return Scores(own.squeeze(-1), likelier, ids, values)
