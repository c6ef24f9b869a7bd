"""Drawing tokens: distributions, filters, penalties, and independence from the batch."""

import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace_shared.messages import SamplingParams, StopParams
from headrace_worker import sampling
from headrace_worker.native.library import Library
from headrace_worker.race import CHUNK
from headrace_worker.sampling import HEADS, Drawn, SamplingState, argmax
from tests.worker.engine_driver import make_admission
from tests.worker.native_variants import library

KERNELS: Library | None = None
"""Those that the test draws with; None: torch."""
VOCAB_SIZE = 5 * CHUNK
LEAST_PENALTY = 1e-6
"""Routers send no smaller one."""


@pytest.fixture(params=["torch", "native", "portable"], autouse=True)
def use_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = None if request.param == "torch" else library(request.param)
    monkeypatch.setattr(sys.modules[__name__], "KERNELS", kernels)


def sample(logits: Tensor, states: Sequence[SamplingState]) -> list[Drawn]:
    return sampling.sample(logits, states, kernels=KERNELS)


def state(
    *,
    prompt: tuple[int, ...] = (1, 2, 3),
    output: tuple[int, ...] = (),
    choice: int = 0,
    stop: StopParams | None = None,
    vocab_size: int = VOCAB_SIZE,
    **params: Any,
) -> SamplingState:
    sampling = SamplingParams(**{"seed": 1, "temperature": 1.0, **params})
    return SamplingState(make_admission(prompt, sampling, output=output, choice=choice, stop=stop), vocab_size)


def logits_of(seed: int, rows: int = 1, width: int = VOCAB_SIZE, spread: float = 3.0) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * spread


def draw(logits: Tensor, **params: Any) -> Drawn:
    return sample(logits, [state(vocab_size=logits.shape[-1], **params)])[0]


def draw_many(logits: Tensor, count: int, **params: Any) -> list[int]:
    """The tokens of `count` sequences with different seeds and equal logits."""
    states = [state(vocab_size=logits.shape[-1], **{**params, "seed": seed}) for seed in range(count)]
    return [item.token for item in sample(logits.expand(count, -1).contiguous(), states)]


@pytest.mark.parametrize("width", [7, CHUNK, 3 * CHUNK, 3 * CHUNK + 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_argmax_is_the_first_of_the_largest(width: int, dtype: torch.dtype) -> None:
    scores = logits_of(0, 50, width).round().to(dtype)
    expected = [int(np.flatnonzero(row == row.max())[0]) for row in scores.float().numpy()]
    assert argmax(scores).tolist() == expected


def test_plain_sampling_follows_the_softmax() -> None:
    logits = logits_of(2, 1, 12, spread=1.0)
    count = 20_000
    observed = np.bincount(draw_many(logits, count, temperature=0.7), minlength=12)
    expected = torch.softmax(logits[0].double() / 0.7, -1).numpy() * count
    assert ((observed - expected) ** 2 / expected).sum() < 31.3, "beyond the 0.1 % quantile of 11 degrees of freedom"


def _kept(logits: Tensor, **params: Any) -> set[int]:
    """All tokens that 3000 draws bring, from a distribution flat enough to bring every one that is kept."""
    return set(draw_many(logits, 3000, **params))


FLAT = torch.linspace(1.0, 0.0, 40)[None, torch.randperm(40, generator=torch.Generator().manual_seed(3))]
RANKED = FLAT[0].argsort(descending=True).tolist()


@pytest.mark.parametrize("k", [1, 2, 17, 40, 1000])
def test_top_k_keeps_the_k_likeliest(k: int) -> None:
    assert _kept(FLAT, top_k=k) == set(RANKED[:k])


@pytest.mark.parametrize("p", [0.01, 0.2, 0.5, 0.9])
def test_top_p_keeps_the_smallest_sufficient_set(p: float) -> None:
    probabilities = torch.softmax(FLAT[0].double(), -1)[RANKED].numpy()
    size = int(np.searchsorted(probabilities.cumsum(), p)) + 1
    assert _kept(FLAT, top_p=p) == set(RANKED[:size])


def test_top_p_counts_only_what_top_k_left() -> None:
    probabilities = torch.softmax(FLAT[0, RANKED[:10]].double(), -1).numpy()
    size = int(np.searchsorted(probabilities.cumsum(), 0.5)) + 1
    assert _kept(FLAT, top_k=10, top_p=0.5) == set(RANKED[:size])


def test_min_p_keeps_what_is_likely_enough_beside_the_likeliest() -> None:
    expected = {index for index in range(40) if math.exp(FLAT[0, index] - 1.0) >= 0.6}
    assert _kept(FLAT, min_p=0.6) == expected


@pytest.mark.parametrize("head", HEADS)
def test_top_p_looks_beyond_the_head_where_it_must(head: int) -> None:
    width = 4 * head
    logits = torch.linspace(0.1, 0.0, width)[None]
    tokens = draw_many(logits, 500, top_p=0.9)
    probabilities = torch.softmax(logits[0].double(), -1).numpy()
    size = int(np.searchsorted(probabilities.cumsum(), 0.9)) + 1
    assert head < size < width
    assert max(tokens) < size
    assert max(tokens) > 0.97 * size


@pytest.mark.parametrize("temperature", [1e-4, 1e-5, 1e-6, 1e-9, 1e-300])
def test_tiny_temperatures_are_greedy_even_at_ties(temperature: float) -> None:
    # Coarse logits, so that several tokens share the maximum and dividing by the temperature would overflow.
    logits = (logits_of(4, 20, spread=20.0).round() * 100).to(torch.float16)
    neighbour = state(seed=5)
    alone = sample(logits[:1], [state(seed=5)])[0].token
    states = [neighbour, *(state(temperature=temperature, num_logprobs=2, seed=row) for row in range(1, 20))]
    drawn = sample(logits, states)
    assert drawn[0].token == alone
    assert [item.token for item in drawn[1:]] == argmax(logits)[1:].tolist()
    for item in drawn[1:]:
        assert item.error is None
        assert item.logprobs is not None
        assert math.isfinite(item.logprobs.logprob)
        assert all(math.isfinite(top.logprob) for top in item.logprobs.top)


@pytest.mark.parametrize("temperature", [2e-4, 1e-3, 1.0, 100.0, 1e30])
def test_no_temperature_overflows(temperature: float) -> None:
    logits = logits_of(5, 8, spread=1e4)
    logits[:, 7] = -math.inf
    drawn = sample(logits, [state(temperature=temperature, seed=row) for row in range(8)])
    assert all(item.error is None and item.token != 7 for item in drawn)


def test_small_temperatures_give_the_likeliest_token() -> None:
    logits = logits_of(6, 30)
    drawn = sample(logits, [state(temperature=1e-3, seed=row) for row in range(30)])
    assert [item.token for item in drawn] == argmax(logits).tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
def test_tiny_repetition_penalties_give_the_likeliest_of_what_was_there_before(temperature: float) -> None:
    prompt = tuple(range(1, 40))
    logits = logits_of(7, 10)
    states = [
        state(prompt=prompt, repetition_penalty=LEAST_PENALTY, temperature=temperature, seed=row) for row in range(10)
    ]
    likeliest = logits[:, list(prompt)].argmax(-1) + prompt[0]
    assert [item.token for item in sample(logits, states)] == likeliest.tolist()


MIXED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "top_k": 20},
    {"temperature": 1.3, "top_p": 0.9, "num_logprobs": 3},
    {"temperature": 1.0, "min_p": 0.05, "choice": 2},
    {"temperature": 0.0, "repetition_penalty": 1.4, "output": (5, 6, 5)},
    {"temperature": 0.9, "presence_penalty": 1.5, "frequency_penalty": 0.5, "output": (9,) * 4},
    {"temperature": 0.7, "logit_bias": {11: 4.0, 12: -100.0}},
    {"temperature": 1.0, "stop": StopParams(max_tokens=9, min_tokens=5, stop_token_ids=(0, 1, 2))},
    {"temperature": 0.0, "num_logprobs": 0},
    {"temperature": 1.0},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_do_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    logits = logits_of(7, len(MIXED)).to(dtype)
    alone = [sample(logits[row : row + 1], [state(seed=row, **params)])[0] for row, params in enumerate(MIXED)]
    together = sample(logits, [state(seed=row, **params) for row, params in enumerate(MIXED)])
    order = torch.randperm(len(MIXED), generator=torch.Generator().manual_seed(8)).tolist()
    shuffled = sample(logits[order], [state(seed=row, **MIXED[row]) for row in order])
    assert together == alone
    assert shuffled == [alone[row] for row in order]


def test_a_row_that_is_not_finite_fails_alone() -> None:
    logits = logits_of(9, len(MIXED))
    expected = sample(logits.clone(), [state(seed=row, **params) for row, params in enumerate(MIXED)])
    for bad, value in ((0, math.nan), (2, math.inf), (5, math.nan)):
        logits[bad, 3] = value
    logits[8] = -math.inf
    drawn = sample(logits, [state(seed=row, **params) for row, params in enumerate(MIXED)])
    assert {row for row, item in enumerate(drawn) if item.error is not None} == {0, 2, 5, 8}
    assert [drawn[row] for row in (1, 3, 4, 6, 7, 9)] == [expected[row] for row in (1, 3, 4, 6, 7, 9)]


def _continue(logits: list[Tensor], first: SamplingState) -> list[int]:
    return [sample(row, [first])[0].token for row in logits]


@pytest.mark.parametrize("params", MIXED)
def test_a_new_admission_goes_on_where_the_last_one_stopped(params: dict[str, Any]) -> None:
    rows = [logits_of(100 + index) for index in range(12)]
    whole = _continue(rows, state(**params))
    output = (*params.get("output", ()), *whole[:7])
    assert _continue(rows[7:], state(**{**params, "output": output})) == whole[7:]


def test_choices_of_one_seed_differ_and_repeat() -> None:
    rows = [logits_of(200 + index) for index in range(10)]
    first, second = ([_continue(rows, state(seed=7, choice=choice)) for choice in range(4)] for _ in range(2))
    assert first == second
    assert len({tuple(tokens) for tokens in first}) == 4


def test_logprobs_are_those_of_the_bare_logits() -> None:
    logits = logits_of(10, 2)
    expected = torch.log_softmax(logits, -1)
    drawn = sample(
        logits, [state(num_logprobs=4, temperature=0.5, top_k=3, logit_bias={5: 9.0}), state(num_logprobs=0)]
    )
    for row, item in enumerate(drawn):
        assert item.logprobs is not None
        assert item.logprobs.logprob == pytest.approx(float(expected[row, item.token]), abs=1e-6)
    assert drawn[0].logprobs is not None
    assert drawn[1].logprobs is not None
    values, ids = expected[0].topk(4)
    assert [top.token for top in drawn[0].logprobs.top] == ids.tolist()
    assert [top.logprob for top in drawn[0].logprobs.top] == pytest.approx(values.tolist(), abs=1e-6)
    assert drawn[1].logprobs.top == ()


def _greedy_with(logits: Tensor, **params: Any) -> int:
    return draw(logits, temperature=0.0, **params).token


def test_repetition_penalty_counts_prompt_and_output() -> None:
    logits = torch.full((1, 20), -2.0)
    logits[0, 3], logits[0, 4], logits[0, 5] = 3.0, 2.9, 2.0
    assert _greedy_with(logits) == 3
    assert _greedy_with(logits, prompt=(3,), repetition_penalty=1.2) == 4
    assert _greedy_with(logits, prompt=(3, 4), repetition_penalty=1.2) == 3, "3.0 / 1.2 is above 2.9 / 1.2"
    assert _greedy_with(logits, prompt=(3,), output=(4,), repetition_penalty=2.0) == 5
    negative = torch.tensor([[-1.0, -1.5]])
    assert _greedy_with(negative, prompt=(0,), repetition_penalty=2.0) == 1, "a negative logit is multiplied"


def test_presence_and_frequency_penalties_count_the_output_only() -> None:
    logits = torch.tensor([[3.0, 2.5, 0.0, 0.0]])
    assert _greedy_with(logits, prompt=(0, 0, 0), presence_penalty=2.0, frequency_penalty=2.0) == 0
    assert _greedy_with(logits, output=(0,), presence_penalty=0.4) == 0
    assert _greedy_with(logits, output=(0,), presence_penalty=0.6) == 1
    assert _greedy_with(logits, output=(0, 0, 0), presence_penalty=0.4) == 0, "once, however often it was seen"
    assert _greedy_with(logits, output=(0,), frequency_penalty=0.2) == 0
    assert _greedy_with(logits, output=(0, 0, 0), frequency_penalty=0.2) == 1


def test_bias_is_added_to_the_logits() -> None:
    logits = torch.tensor([[3.0, 2.5, 0.0, -50.0]])
    assert _greedy_with(logits, logit_bias={0: -1.0}) == 1
    assert _greedy_with(logits, logit_bias={3: 100.0}) == 3
    assert _greedy_with(logits, logit_bias={0: -1.0, 99: 100.0}) == 1, "a token that does not exist cannot be drawn"


def test_stop_tokens_wait_for_min_tokens() -> None:
    logits = torch.tensor([[0.0, 5.0, 9.0, 7.0]])
    one = state(
        temperature=0.0, vocab_size=4, stop=StopParams(max_tokens=9, min_tokens=2, stop_token_ids=(2, 3, 4_000_000))
    )
    assert [sample(logits, [one])[0].token for _ in range(3)] == [1, 1, 2]
