"""What others do, as they do it."""

from headrace_autoscaler.observation import Observation
from headrace_simulator.scalers import Fixed, LagThreshold


def seen(num_ready: int, lag: int) -> Observation:
    return Observation(num_ready=num_ready, num_waiting=lag)


def test_a_lag_is_divided_by_the_threshold() -> None:
    scaler = LagThreshold(10, 1, 100)
    assert scaler.decide(seen(10, 150), 0.0).desired == 15


def test_it_is_looked_at_every_fifteen_seconds() -> None:
    scaler = LagThreshold(10, 1, 100)
    scaler.decide(seen(10, 150), 0.0)
    assert scaler.decide(seen(15, 300), 5.0).desired == 15
    assert scaler.decide(seen(15, 300), 15.0).desired == 30


def test_it_at_most_doubles_or_adds_four() -> None:
    assert LagThreshold(10, 1, 100).decide(seen(10, 900), 0.0).desired == 20
    assert LagThreshold(10, 1, 100).decide(seen(1, 900), 0.0).desired == 5


def test_a_tenth_more_or_less_changes_nothing() -> None:
    assert LagThreshold(10, 1, 100).decide(seen(20, 215), 0.0).desired == 20


def test_less_counts_only_after_five_minutes() -> None:
    scaler = LagThreshold(10, 1, 100)
    scaler.decide(seen(20, 200), 0.0)
    assert scaler.decide(seen(20, 50), 150.0).desired == 20
    assert scaler.decide(seen(20, 50), 315.0).desired == 5


def test_it_keeps_within_its_limits() -> None:
    scaler = LagThreshold(10, 2, 12)
    assert scaler.decide(seen(10, 500), 0.0).desired == 12
    assert LagThreshold(10, 2, 12).decide(seen(2, 0), 0.0).desired == 2


def test_fixed_is_fixed() -> None:
    assert {Fixed(7).decide(seen(3, lag), 0.0).desired for lag in (0, 1000)} == {7}
