"""Allowed tokens and bad words: what is drawn keeps to them, and nobody else in the batch notices."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_shared.codec import pack_ids
from headrace_shared.fleet_messages import ModelCard
from headrace_shared.messages import SamplingParams
from headrace_worker.constraint import Constraints
from headrace_worker.restriction import Restriction
from headrace_worker.sampling import Drawn, SamplingState, sample
from tests.worker.engine_driver import make_admission

VOCAB_SIZE = 100
CARD = ModelCard(model="m", tokenizer=b"{}", vocab_size=VOCAB_SIZE, context=64, eos_token_ids=(0,))
CONSTRAINTS = Constraints(CARD, 1)


def state(output: Sequence[int] = (), **params: Any) -> SamplingState:
    admission = make_admission([5, 6], SamplingParams(**{"seed": 1, "temperature": 1.0, **params}), output=output)
    return SamplingState(admission, VOCAB_SIZE, CONSTRAINTS.of(admission))


def logits(rows: int, step: int) -> torch.Tensor:
    return torch.randn(rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(step))


def draw(count: int, **params: Any) -> list[int]:
    own = state(**params)
    return [sample(logits(1, step), [own], CONSTRAINTS)[0].token for step in range(count)]


def contains(tokens: Sequence[int], word: Sequence[int]) -> bool:
    return any(tuple(tokens[i : i + len(word)]) == tuple(word) for i in range(len(tokens)))


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
def test_only_allowed_tokens_are_drawn(temperature: float) -> None:
    allowed = [3, 31, 32, 64, 99]
    drawn = draw(200, allowed_token_ids=pack_ids(allowed), temperature=temperature)
    assert set(drawn) == set(allowed)


@settings(max_examples=60, deadline=None)
@given(
    words=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple), min_size=1, max_size=6),
    seed=st.integers(0, 1000),
    cut=st.integers(0, 30),
)
def test_no_bad_word_is_ever_in_the_output(words: list[tuple[int, ...]], seed: int, cut: int) -> None:
    """Among few tokens they would be met all the time. An attempt that goes on from `cut` keeps to them as well."""
    params: dict[str, Any] = {"allowed_token_ids": pack_ids(range(6)), "bad_words": tuple(words), "seed": seed}
    whole = draw(30, **params)
    assert not any(contains(whole, word) for word in words)
    later = state(whole[:cut], **params)
    rest = [sample(logits(1, step), [later], CONSTRAINTS)[0].token for step in range(cut, 30)]
    assert whole[:cut] + rest == whole


def test_a_word_is_banned_only_where_it_would_be_completed() -> None:
    restriction = Restriction(SamplingParams(seed=0, bad_words=((1, 2), (2, 2, 3), (9,))), [], VOCAB_SIZE)

    def banned() -> set[int]:
        bits = np.unpackbits(restriction.words.view(np.uint8), count=VOCAB_SIZE, bitorder="little")
        return set(np.flatnonzero(bits == 0).tolist())

    seen = []
    for token in (1, 5, 2, 2, 1):
        restriction.record(token)
        seen.append(banned())
    assert seen == [{2, 9}, {9}, {9}, {3, 9}, {2, 9}]


def test_a_copy_goes_on_by_itself() -> None:
    own = state(bad_words=((1, 2),))
    ahead = own.after([1])
    assert own.constraint is not ahead.constraint
    first, second = (CONSTRAINTS.masks([each.constraint]) for each in (own, ahead) if each.constraint is not None)
    assert not np.array_equal(first, second)


def test_a_neighbour_is_not_touched_in_any_bit() -> None:
    neighbours: list[dict[str, Any]] = [
        {"temperature": 1.0, "num_logprobs": 5},
        {"temperature": 0.0, "num_logprobs": 3},
        {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.2, "num_logprobs": 1},
    ]
    rows = logits(4, 7)
    alone: list[Drawn] = [sample(rows[[i]], [state(**params)])[0] for i, params in enumerate(neighbours)]
    before = rows.clone()
    restricted = state(allowed_token_ids=pack_ids([4, 5]), bad_words=((4,),))
    together = sample(rows, [*(state(**params) for params in neighbours), restricted], CONSTRAINTS)
    assert together[:3] == alone
    assert together[3].token == 5
    assert torch.equal(rows, before), "the logits themselves belong to nobody"


def test_log_probabilities_are_those_of_the_bare_logits() -> None:
    rows = logits(1, 3)
    own = state(allowed_token_ids=pack_ids([40]), num_logprobs=0, logprob_token_ids=(7, 8, 9))
    [drawn] = sample(rows, [own], CONSTRAINTS)
    expected = torch.log_softmax(rows[0], -1)
    assert drawn.logprobs is not None and drawn.token == 40
    assert {item.token for item in drawn.logprobs.top} == {7, 8, 9}
    values = [item.logprob for item in drawn.logprobs.top]
    assert values == sorted(values, reverse=True)
    for item in drawn.logprobs.top:
        assert item.logprob == pytest.approx(float(expected[item.token]), abs=1e-6)
