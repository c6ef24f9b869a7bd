"""Who may join the queue."""

import math

import pytest

from headrace_router.forecast import Estimate
from headrace_router.queue_limits import Depth, Obstacle, QueueLimits, Refusal, judge

LIMITS = QueueLimits(max_requests=100, max_tokens=100_000, max_wait_s=60.0)
EMPTY = Depth(0, 0.0)


def estimate(wait_s: float, answer_s: float = 2.0) -> Estimate:
    return Estimate(5, wait_s, wait_s + 0.1, wait_s + 0.1 + answer_s, wait_s + 0.1 + 2 * answer_s)


def asked(
    expected: Estimate | None,
    depth: Depth = EMPTY,
    left_s: float = 600.0,
    *,
    is_returning: bool = False,
    others_bear_s: float = math.inf,
) -> Refusal | None:
    return judge(
        expected,
        depth,
        Depth(1, 1000.0),
        LIMITS,
        left_s=left_s,
        margin=1.5,
        spacing_s=0.5,
        is_returning=is_returning,
        others_bear_s=others_bear_s,
    )


def test_a_short_queue_takes_everybody() -> None:
    assert asked(estimate(5.0), Depth(10, 1000.0)) is None
    assert asked(None, Depth(10, 1000.0)) is None


def test_the_queue_is_bounded_in_requests_and_tokens() -> None:
    full = asked(estimate(1.0), Depth(90, 1000.0))
    assert full is not None and full.obstacle is Obstacle.FULL
    assert full.free_in_s == pytest.approx(11 * 0.5)
    assert asked(None, Depth(100, 1000.0)) is not None
    heavy = asked(estimate(1.0), Depth(10, 99_000.0))
    assert heavy is not None and heavy.obstacle is Obstacle.FULL and heavy.free_in_s > 0.0


def test_a_call_of_many_prompts_counts_as_many() -> None:
    many = judge(
        None, Depth(10, 0.0), Depth(80, 80.0), LIMITS, left_s=9.0, margin=1.5, spacing_s=0.5, is_returning=False
    )
    assert many is not None and many.obstacle is Obstacle.FULL


def test_one_that_is_larger_than_the_queue_may_come_when_nothing_waits() -> None:
    assert (
        judge(None, EMPTY, Depth(1, 1e9), LIMITS, left_s=600.0, margin=1.5, spacing_s=0.5, is_returning=False) is None
    )


def test_waits_above_the_limit_are_refused_with_the_time_until_they_are_not() -> None:
    assert asked(estimate(47.0)) is None
    refused = asked(estimate(58.0))
    assert refused is not None and refused.obstacle is Obstacle.WAIT
    assert refused.free_in_s == pytest.approx(58.1 - 48.0)


def test_who_comes_back_when_told_to_gets_the_rest_of_each_limit() -> None:
    for expected, depth in ((estimate(55.0), EMPTY), (estimate(1.0), Depth(90, 1000.0))):
        assert asked(expected, depth) is not None
        assert asked(expected, depth, is_returning=True) is None
    assert asked(estimate(61.0), is_returning=True) is not None


def test_an_answer_that_would_come_too_late_is_refused() -> None:
    assert asked(estimate(3.0, answer_s=2.0), left_s=20.0) is None
    refused = asked(estimate(9.0, answer_s=2.0), left_s=12.0)
    assert refused is not None and refused.obstacle is Obstacle.DEADLINE
    assert refused.free_in_s == pytest.approx((9.1 * 1.5 - 0.8 * (12.0 - 6.0)) / 1.5)


def test_a_call_that_can_wait_long_leaves_a_queue_that_others_can_bear() -> None:
    expected = estimate(8.0, answer_s=2.0)
    assert asked(expected, left_s=26.0) is None
    refused = asked(expected, left_s=26.0, others_bear_s=12.0)
    assert refused is not None and refused.obstacle is Obstacle.DEADLINE
    assert refused.borne_s == pytest.approx(26.0 - 6.0), "by itself it could wait that long"
    assert refused.free_in_s == pytest.approx((8.1 * 1.5 - 0.8 * 12.0) / 1.5)
    assert asked(expected, left_s=26.0, others_bear_s=12.0, is_returning=True) is None
    assert asked(estimate(4.0, answer_s=2.0), left_s=26.0, others_bear_s=0.1) is None, "but not at any price"


def test_a_deadline_that_the_queue_is_not_to_blame_for_is_the_clients_business() -> None:
    assert asked(estimate(0.0, answer_s=100.0), left_s=1.0) is None
