"""Timers of one period go off together, whenever they were set and however late the work between them ends."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_shared.beats import NEAR, until_beat


@pytest.mark.parametrize(
    ("now", "expected"),
    [(100.0, 0.5), (100.1, 0.4), (100.4, 0.1), (100.45, 0.55), (100.49, 0.51)],
)
def test_the_next_multiple_or_the_one_behind_it(now: float, expected: float) -> None:
    assert until_beat(0.5, now) == pytest.approx(expected)


@given(st.floats(0.01, 60.0), st.floats(0.0, 1e7), st.floats(NEAR, 0.9))
def test_it_lasts_about_a_period_and_ends_at_a_multiple(period_s: float, now: float, near: float) -> None:
    left_s = until_beat(period_s, now, near)
    assert near * period_s <= left_s <= (1 + near) * period_s * (1 + 1e-9)
    phase = (now + left_s) / period_s
    assert phase == pytest.approx(round(phase), abs=1e-3)


@given(st.floats(0.0, 1e6), st.floats(0.0, 0.2))
def test_a_timer_that_goes_off_a_little_early_or_late_is_not_set_twice(number: float, late_s: float) -> None:
    period_s = 0.5
    begun = period_s * int(number)
    for now in (begun - 0.001, begun, begun + late_s):
        ends = now + until_beat(period_s, max(0.0, now))
        assert ends == pytest.approx(begun + period_s) or begun == 0.0
