"""Predictions that are wrong in one direction are corrected, and their spread becomes a margin."""

import random

import pytest

from headrace_router.calibration import MAX_MARGIN, MIN_MARGIN, Calibration


def test_a_constant_error_is_corrected() -> None:
    calibration = Calibration()
    for second in range(200):
        calibration.observe(10.0 * calibration.factor, 15.0, calibration.factor, second)
    assert calibration.factor == pytest.approx(1.5, rel=0.05)


def test_the_margin_covers_almost_all() -> None:
    calibration, draw = Calibration(), random.Random(1)
    num_exceeded = 0
    for number in range(4000):
        actual = 10.0 * draw.lognormvariate(0.0, 0.3)
        if number >= 1000 and actual > 10.0 * calibration.factor * calibration.margin:
            num_exceeded += 1
        calibration.observe(10.0 * calibration.factor, actual, calibration.factor, number)
    assert num_exceeded / 3000 < 0.04


def test_short_waits_teach_nothing_and_nothing_runs_away() -> None:
    calibration = Calibration()
    calibration.observe(0.01, 0.4, 1.0, 0.0)
    assert (calibration.num_observed, calibration.factor) == (0, 1.0)
    for second in range(1000):
        calibration.observe(1.0, 1e6, calibration.factor, second)
    assert calibration.factor <= 3.01 and calibration.margin <= MAX_MARGIN + 1e-9
    for second in range(1000, 2000):
        calibration.observe(1e6, 0.5, calibration.factor, second)
    assert calibration.factor >= 0.33 and calibration.margin >= MIN_MARGIN - 1e-9


def test_many_who_met_the_same_hiccup_are_one_observation() -> None:
    """A queue of two hundred that a pause of three seconds made late must not halve what is promised afterwards."""
    calibration = Calibration()
    for number in range(200):
        calibration.observe(2.0, 5.0, 1.0, number * 0.015)
    assert calibration.margin < 1.25 * 1.3
    assert calibration.factor < 2.0
