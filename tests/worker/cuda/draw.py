"""Drawing tokens without asking the device for anything: no size and no branch depends on what it has computed.

The same steps, the same noise and so the same tokens as `sampling.sample`, which looks at values to save work.
"""

import torch
from torch import Tensor

from headrace_worker.race import race
from headrace_worker.sampling import argmax

SEEN_IN_PROMPT = 1 << 24
"""Added to the count of a token that the prompt contains; below it is how often it was drawn."""


def adjust(scores: Tensor, rows: Tensor, tokens: Tensor, values: Tensor) -> None:
    """Adds values to single scores, in place: bias, or minus infinity for what must not be drawn. Triples may repeat a
    (row, token)."""
    scores.index_put_((rows, tokens), values, accumulate=True)


def penalize(
    scores: Tensor, rows: Tensor, counts: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> None:
    """Repetition, presence and frequency penalties on some rows of scores [R, vocab_size], float32, in place. rows [n];
    counts [n, vocab_size], see SEEN_IN_PROMPT; the penalties [n, 1], float32."""
    drawn = counts % SEEN_IN_PROMPT
    values = scores[rows]
    repeated = torch.where(values > 0, values / repetition, values * repetition)
    values = torch.where((counts > 0) & (repetition != 1.0), repeated, values)
    values = values - (frequency * drawn + presence * (drawn > 0))
    scores.index_copy_(0, rows, values)


def best(scores: Tensor) -> tuple[Tensor, Tensor]:
    """scores [R, vocab_size] -> arg-max [R], int64, and whether its score is a finite number [R]."""
    tokens = argmax(scores)
    return tokens, scores.gather(-1, tokens[:, None]).squeeze(-1).isfinite()


def draw(
    scores: Tensor,
    temperatures: Tensor,
    top_ks: Tensor,
    top_ps: Tensor,
    min_ps: Tensor,
    keys: Tensor,
    *,
    filters: bool,
) -> Tensor:
    """scores [R, vocab_size], float32; the rest [R], as in `Frame` -> tokens [R], int64. A row of temperature 0 gets
    the arg-max. `filters`: some row has a top-k or top-p."""
    likeliest = argmax(scores)
    is_greedy = temperatures <= 0.0
    peaks = scores.gather(-1, likeliest[:, None])
    weights = ((scores - peaks) / torch.where(is_greedy, 1.0, temperatures)[:, None]).exp()
    if filters:
        weights = _filtered(weights, top_ks, top_ps)
    weights = weights.masked_fill(weights < min_ps[:, None], 0.0)
    # A row of NaN has no weights to race; whatever it gets is not used.
    return torch.where(is_greedy, likeliest, race(weights, keys).clamp(0, scores.shape[-1] - 1))


def _filtered(weights: Tensor, top_ks: Tensor, top_ps: Tensor) -> Tensor:
    """Top-k, then top-p. Equals of the last token kept are kept too."""
    width = weights.shape[-1]
    descending = weights.sort(dim=-1, descending=True).values
    ks = torch.where(top_ks > 0, top_ks, width).clamp(max=width).long()
    threshold = descending.gather(-1, ks[:, None] - 1)
    kept = descending.masked_fill(descending < threshold, 0.0).cumsum(-1, dtype=torch.float64)
    reaches = torch.searchsorted(kept, kept[:, -1:] * top_ps[:, None]).clamp(max=width - 1)
    threshold = torch.where(top_ps[:, None] < 1.0, descending.gather(-1, reaches).maximum(threshold), threshold)
    return weights.masked_fill(weights < threshold, 0.0)
