"""Draws the next tokens of a batch from its logits.

Every step works row by row, so that what a sequence gets does not depend on who shares its batch. All filters become a
threshold on the weights: nothing is sorted for the plain cases, and what is sorted is only the head of the distribution
where that is enough. The draw is a race (`race.py`): rounding, which does depend on the batch, hardly ever changes it.
On a CPU with compiled kernels filters and race are one call (`native/sampling.py`); what is here is its reference.
"""

import math
from collections.abc import Sequence
from copy import copy
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from headrace_shared.messages import Admission, SamplingParams, TokenLogprobs, TopLogprob
from headrace_worker.constraint import Constraints, Limit
from headrace_worker.native.checks import ELEMENT_TYPES
from headrace_worker.native.library import Library
from headrace_worker.native.rows import argmax as native_argmax
from headrace_worker.native.sampling import Filters
from headrace_worker.native.sampling import draw as native_draw
from headrace_worker.noise import noise_keys
from headrace_worker.penalties import Penalties
from headrace_worker.race import CHUNK, chunk_sums, race

GREEDY_TEMPERATURE = 1e-4
"""Up to here sampling is arg-max: the limit, where ties and overflow would otherwise decide."""
HEADS = (256, 4096)
"""How many of the likeliest tokens are looked at for top-p, until that is enough; then a row is sorted whole."""
LOG2_E = 1.0 / math.log(2.0)
NOT_FINITE = "the model's output is not finite"


class Drawn(NamedTuple):
    token: int
    logprobs: TokenLogprobs | None
    error: str | None


class SamplingState:
    """What sampling must know of one sequence. `record` every token drawn for it."""

    def __init__(self, admission: Admission, vocab_size: int, constraint: Limit | None = None) -> None:
        request = admission.request
        self.params: SamplingParams = request.sampling
        self.choice = admission.choice
        self.num_output = len(admission.output) // 4
        self.is_greedy = self.params.temperature <= GREEDY_TEMPERATURE
        self.penalties = Penalties.for_admission(admission, vocab_size)
        self.constraint = constraint
        self._min_tokens = request.stop.min_tokens
        self._stop_ids = np.array(
            [token for token in request.stop.stop_token_ids if token < vocab_size], dtype=np.int64
        )

    @property
    def forbidden(self) -> np.ndarray[tuple[int], np.dtype[np.int64]] | None:
        """Tokens that must not be drawn now."""
        return self._stop_ids if self.num_output < self._min_tokens and self._stop_ids.size else None

    @property
    def is_plain(self) -> bool:
        """The arg-max of the bare logits is all that is wanted."""
        return self.is_greedy and self.params.num_logprobs is None and not self.adjusts

    @property
    def adjusts(self) -> bool:
        """The logits are changed before anything is drawn."""
        return self.penalties is not None or self.forbidden is not None or self.constraint is not None

    @property
    def problem(self) -> str | None:
        """Why nothing can be drawn, whatever the logits."""
        return None if self.constraint is None else self.constraint.problem

    def after(self, tokens: Sequence[int]) -> "SamplingState":
        """A state of its own, as it would be if these tokens were drawn next."""
        ahead = copy(self)
        ahead.penalties = None if self.penalties is None else self.penalties.copy()
        ahead.constraint = None if self.constraint is None else self.constraint.copy()
        for token in tokens:
            ahead.record(token)
        return ahead

    def record(self, token: int) -> None:
        self.num_output += 1
        if self.penalties is not None:
            self.penalties.record(token)
        if self.constraint is not None:
            self.constraint.record(token)


def sample(
    logits: Tensor,
    states: Sequence[SamplingState],
    constraints: Constraints | None = None,
    kernels: Library | None = None,
) -> list[Drawn]:
    """logits [rows, vocab_size] of any float type; `states` one a row, which learn of their tokens. `constraints`:
    those that the states' own are of. With `kernels` logits must lie in the CPU's memory."""
    best = argmax(logits, kernels)
    finite = logits.gather(-1, best[:, None]).squeeze(-1).isfinite().tolist()
    tokens: list[int] = best.tolist()
    logprobs: dict[int, TokenLogprobs] = {}
    special = [row for row, state in enumerate(states) if finite[row] and not state.is_plain]
    if special:
        chosen = [states[row] for row in special]
        scores = _rows(logits, special).to(torch.float32, copy=any(state.adjusts for state in chosen))
        wanting = [index for index, state in enumerate(chosen) if state.params.num_logprobs is not None]
        raw = F.log_softmax(_rows(scores, wanting), dim=-1) if wanting else None
        _adjust(scores, chosen, constraints)
        drawn = _draw(scores, chosen, kernels)
        values = drawn.tolist()
        for row, token in zip(special, values, strict=True):
            tokens[row] = token
        if raw is not None:
            found = _logprobs(raw, drawn[wanting], [chosen[index].params for index in wanting])
            logprobs = {special[index]: item for index, item in zip(wanting, found, strict=True)}
    results = []
    for row, state in enumerate(states):
        problem = state.problem if finite[row] else NOT_FINITE
        if problem is None:
            state.record(tokens[row])
        results.append(Drawn(tokens[row], logprobs.get(row), problem))
    return results


def drawn_greedily(tokens: Sequence[int], states: Sequence[SamplingState]) -> list[Drawn]:
    """For states that are all plain: the arg-max of their rows, below 0 where logits are not finite, as `sample` would
    give it."""
    results = []
    for token, state in zip(tokens, states, strict=True):
        if token < 0:
            results.append(Drawn(0, None, NOT_FINITE))
            continue
        state.record(token)
        results.append(Drawn(token, None, None))
    return results


def argmax(scores: Tensor, kernels: Library | None = None) -> Tensor:
    """First index of the largest value in each row. In two levels, since torch's arg-max does not vectorize on CPUs."""
    if kernels is not None and scores.dtype in ELEMENT_TYPES:
        return native_argmax(scores, library=kernels)
    num_rows, width = scores.shape
    if width % CHUNK:
        return scores.argmax(-1)
    chunks = scores.view(num_rows, -1, CHUNK)
    chunk = chunks.amax(-1).argmax(-1)
    within = chunks[torch.arange(num_rows, device=scores.device), chunk].argmax(-1)
    return chunk * CHUNK + within


def _adjust(scores: Tensor, states: Sequence[SamplingState], constraints: Constraints | None) -> None:
    """Penalties, bias, forbidden tokens and grammars, in place."""
    for row, state in enumerate(states):
        if state.penalties is not None:
            state.penalties.apply(scores[row])
        if (forbidden := state.forbidden) is not None:
            scores[row, torch.from_numpy(forbidden).to(scores.device)] = -torch.inf
    constrained = [(row, each) for row, state in enumerate(states) if (each := state.constraint) is not None]
    if constraints is not None and constrained:
        words = constraints.masks([each for _, each in constrained])
        bits = np.unpackbits(~words.view(np.uint8), axis=-1, count=scores.shape[-1], bitorder="little")
        banned = torch.from_numpy(bits).view(torch.bool).to(scores.device)
        for (row, each), where in zip(constrained, banned, strict=True):
            if each.problem is None:
                scores[row].masked_fill_(where, -torch.inf)


def _draw(scores: Tensor, states: Sequence[SamplingState], kernels: Library | None) -> Tensor:
    """scores [rows, vocab_size], adjusted -> token ids [rows]."""
    random_rows = [row for row, state in enumerate(states) if not state.is_greedy]
    if len(random_rows) == len(states):
        return _draw_at_random(scores, states, kernels)
    tokens = argmax(scores, kernels)
    if random_rows:
        index = torch.tensor(random_rows, device=scores.device)
        tokens[index] = _draw_at_random(scores[index], [states[row] for row in random_rows], kernels)
    return tokens


def _draw_at_random(scores: Tensor, states: Sequence[SamplingState], kernels: Library | None) -> Tensor:
    """The same for states none of which is greedy."""
    if kernels is not None:
        return native_draw(scores, _filters(states), _keys(states), library=kernels)
    temperatures = _column([state.params.temperature for state in states], torch.float32, scores.device)
    # The likeliest token has weight 1 whatever the temperature, so nothing can overflow.
    # Not `exp`: where results are small torch's takes ten times as long, and masked tokens have none but those.
    weights = (scores - scores.amax(-1, keepdim=True)).mul_(LOG2_E / temperatures).exp2_()
    _filter(weights, states)
    return race(weights, _keys(states).to(scores.device))


def _keys(states: Sequence[SamplingState]) -> Tensor:
    keys = noise_keys(
        np.array([state.params.seed for state in states], dtype=np.uint64),
        np.array([state.choice for state in states], dtype=np.uint64),
        np.array([state.num_output for state in states], dtype=np.uint64),
    )
    return torch.from_numpy(keys)


def _filters(states: Sequence[SamplingState]) -> Filters:
    params = [state.params for state in states]
    return Filters(
        torch.tensor([each.temperature for each in params], dtype=torch.float32),
        torch.tensor([max(0, each.top_k) for each in params], dtype=torch.int64),
        torch.tensor([each.top_p for each in params], dtype=torch.float64),
        torch.tensor([each.min_p for each in params], dtype=torch.float32),
    )


def _filter(weights: Tensor, states: Sequence[SamplingState]) -> None:
    """Zeroes in place what top-k, then top-p, then min-p leave out. Equals of the last token kept are kept too."""
    width = weights.shape[-1]
    cut = [row for row, state in enumerate(states) if 0 < state.params.top_k < width]
    if cut:
        ks = torch.tensor([[states[row].params.top_k] for row in cut], device=weights.device)
        heads = _rows(weights, cut).topk(int(ks.max()), dim=-1).values
        _keep(weights, cut, heads.gather(-1, ks - 1))
    cut = [row for row, state in enumerate(states) if state.params.top_p < 1.0]
    if cut:
        ps = _column([states[row].params.top_p for row in cut], torch.float64, weights.device)
        _keep(weights, cut, _top_p_thresholds(_rows(weights, cut), ps))
    cut = [row for row, state in enumerate(states) if state.params.min_p > 0.0]
    if cut:
        _keep(weights, cut, _column([states[row].params.min_p for row in cut], torch.float32, weights.device))


def _keep(weights: Tensor, rows: list[int], thresholds: Tensor) -> None:
    if len(rows) == weights.shape[0]:
        weights.masked_fill_(weights < thresholds, 0.0)
    else:
        selected = weights[rows]
        weights[rows] = selected.masked_fill_(selected < thresholds, 0.0)


def _rows(values: Tensor, rows: list[int]) -> Tensor:
    """Some of the rows, or the tensor itself if that is all of them."""
    return values if len(rows) == values.shape[0] else values[torch.tensor(rows, device=values.device)]


def _top_p_thresholds(weights: Tensor, ps: Tensor) -> Tensor:
    """The smallest weight in the smallest set of likeliest tokens that together reach `ps` of all: [rows, 1]."""
    targets = chunk_sums(weights).cumsum(-1)[:, -1:] * ps
    thresholds = torch.empty((weights.shape[0], 1), dtype=weights.dtype, device=weights.device)
    pending = torch.arange(weights.shape[0], device=weights.device)
    for size in (*(size for size in HEADS if size < weights.shape[-1]), weights.shape[-1]):
        head = _rows(weights, pending.tolist()).topk(size, dim=-1).values
        thresholds[pending], reached = _threshold_in(head, targets[pending])
        pending = pending[~reached]
        if not pending.numel():
            break
    return thresholds


def _threshold_in(descending: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Thresholds [rows, 1], and whether they were reached [rows]; where not, the threshold is the last weight."""
    reaches = torch.searchsorted(descending.cumsum(-1, dtype=torch.float64), targets)
    last = descending.shape[-1] - 1
    return descending.gather(-1, reaches.clamp(max=last)), reaches.squeeze(-1) <= last


def _column(values: list[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)[:, None]


def _logprobs(raw: Tensor, tokens: Tensor, params: list[SamplingParams]) -> list[TokenLogprobs]:
    own = raw.gather(-1, tokens[:, None]).squeeze(-1).tolist()
    counts = [each.num_logprobs or 0 for each in params]
    values, ids = raw.topk(max(*counts, 1), dim=-1)
    found = []
    for row, (logprob, i, v, n) in enumerate(zip(own, ids.tolist(), values.tolist(), counts, strict=True)):
        wanted = params[row].logprob_token_ids
        if wanted:
            top = likeliest_first(wanted, raw[row, torch.tensor(wanted, device=raw.device)].tolist())
        else:
            top = tuple(TopLogprob(token, value) for token, value in zip(i[:n], v[:n], strict=True))
        found.append(TokenLogprobs(logprob, top))
    return found


def likeliest_first(tokens: Sequence[int], logprobs: Sequence[float]) -> tuple[TopLogprob, ...]:
    pairs = [TopLogprob(token, logprob) for token, logprob in zip(tokens, logprobs, strict=True)]
    return tuple(sorted(pairs, key=lambda pair: -pair.logprob))
