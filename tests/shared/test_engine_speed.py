"""What iterations, sequences and prompt tokens cost, told apart from sums."""

import random

import pytest

from headrace_shared.engine_speed import HALF_LIFE_S, EngineSpeed, SpeedMeter, Work


def work(speed: EngineSpeed, num_iterations: int, num_sequences: int, num_prompt_tokens: int) -> Work:
    num_outputs = num_iterations * num_sequences
    busy_s = num_iterations * speed.per_iteration + num_outputs * speed.per_output
    return Work(busy_s + num_prompt_tokens * speed.per_prompt, num_iterations, num_outputs, num_prompt_tokens)


@pytest.mark.parametrize("true", [EngineSpeed(0.006, 0.0008, 0.00025), EngineSpeed(0.01, 0.00005, 0.00002)])
def test_a_lightly_loaded_fleet_says_what_a_full_batch_would_take(true: EngineSpeed) -> None:
    meter, draw = SpeedMeter(), random.Random(1)
    for second in range(60):
        meter.observe(work(true, 100, draw.randint(1, 4), draw.randint(0, 800)), float(second))
    found = meter.speed()
    assert found is not None
    assert found.iteration_s(64, 192) == pytest.approx(true.iteration_s(64, 192), rel=0.15)


def test_an_even_load_is_guessed_at_and_never_negative() -> None:
    meter = SpeedMeter()
    for second in range(10):
        meter.observe(work(EngineSpeed(0.01, 0.001, 0.0), 90, 1, 0), float(second))
    found = meter.speed()
    assert found is not None and min(found) >= 0.0
    assert found.iteration_s(1, 0) == pytest.approx(0.011, rel=0.01)
    assert found.iteration_s(32, 0) > 2 * found.iteration_s(1, 0)


def test_noise_makes_no_cost_negative() -> None:
    meter, draw = SpeedMeter(), random.Random(2)
    for second in range(100):
        exact = work(EngineSpeed(0.01, 0.00001, 0.00001), 80, draw.randint(1, 3), draw.randint(0, 50))
        meter.observe(exact._replace(busy_s=exact.busy_s * draw.uniform(0.8, 1.2)), float(second))
        speed = meter.speed()
        assert speed is not None and min(speed) >= 0.0


def test_what_was_long_ago_is_forgotten() -> None:
    meter, slow, fast = SpeedMeter(), EngineSpeed(0.1, 0.0, 0.0), EngineSpeed(0.01, 0.0, 0.0)
    for second in range(60):
        meter.observe(work(slow, 10, 1, 0), float(second))
    for second in range(60, 60 + round(6 * HALF_LIFE_S)):
        meter.observe(work(fast, 100, 1, 0), float(second))
    found = meter.speed()
    assert found is not None and found.iteration_s(1, 0) == pytest.approx(0.01, rel=0.1)


def test_nothing_is_known_at_first_nor_from_idle_workers() -> None:
    meter = SpeedMeter()
    meter.observe(Work(0.0, 0.0, 0.0, 0.0), 1.0)
    assert meter.speed() is None
