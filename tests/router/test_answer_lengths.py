"""How long answers get."""

import random

import pytest

from headrace_router.answer_lengths import AnswerLengths


def test_answers_that_always_reach_their_limit_are_expected_to() -> None:
    lengths = AnswerLengths()
    for _ in range(100):
        lengths.observe(200, 200)
    expected = lengths.expect(200)
    assert expected.mean == pytest.approx(200, rel=0.1) and expected.high <= 200
    assert lengths.left(200, 150) == pytest.approx(50, rel=0.3)


def test_short_answers_to_large_limits_are_learnt() -> None:
    lengths, draw = AnswerLengths(), random.Random(1)
    for _ in range(300):
        lengths.observe(4000, min(4000, 1 + round(draw.expovariate(1 / 120))))
    assert lengths.expect(4000).mean == pytest.approx(120, rel=0.6)
    assert lengths.expect(4000).high > 1.5 * lengths.expect(4000).mean
    # Lengths vary as much as they are long: that it runs already tells nothing.
    assert lengths.left(4000, 400) > 50


def test_other_limits_are_not_touched() -> None:
    lengths = AnswerLengths()
    for _ in range(50):
        lengths.observe(4000, 10)
    assert lengths.expect(16).mean == 16


@pytest.mark.parametrize(("max_tokens", "min_tokens", "num_done"), [(1, 0, 0), (10, 10, 9), (5, 0, 4), (1 << 20, 0, 7)])
def test_what_is_left_is_at_least_one_and_at_most_what_is_allowed(
    max_tokens: int, min_tokens: int, num_done: int
) -> None:
    lengths = AnswerLengths()
    lengths.observe(max_tokens, 1)
    assert 1.0 <= lengths.left(max_tokens, num_done, min_tokens) <= max_tokens - num_done
    assert max(1, min_tokens) <= lengths.expect(max_tokens, min_tokens).mean <= max_tokens
