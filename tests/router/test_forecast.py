"""When what waits will begin, against a simulation of every single place."""

import heapq
import random

import pytest

from headrace_router.forecast import Capacity, Forecast, Mix, make_forecast
from headrace_shared.engine_speed import EngineSpeed
from headrace_shared.fleet_messages import RunningGroup, WaitingGroup

SPEED = EngineSpeed(0.02, 0.0, 0.0)
"""A token takes 20 ms, whatever the batch; prompts cost nothing but iterations."""
CAPACITY = Capacity(num_ready=2, num_places=4, num_tokens=4000, speed=SPEED)
MIX = Mix(100.0, 50.0)


def requests(count: int, output_tokens: int = 50) -> list[WaitingGroup]:
    return [WaitingGroup(0, number + 1, 1, 1, 100, output_tokens) for number in range(count)]


def forecast(
    waiting: list[WaitingGroup], running: list[RunningGroup], capacity: Capacity = CAPACITY, share: float = 1.0
) -> Forecast:
    made = make_forecast(waiting, running, capacity, MIX, share)
    assert made is not None
    return made


def newcomer_s(made: Forecast, num_added: int = 0) -> float:
    return made.newcomer(made.order.key_of_newcomer(0, "", 1.0, 150.0), num_added, 100.0, 50.0, 60.0).first_token_s


def test_with_a_free_place_nobody_waits() -> None:
    made = forecast([], [RunningGroup(7, 100)])
    estimate = made.newcomer(made.order.key_of_newcomer(0, "", 1.0, 150.0), 0, 100.0, 50.0, 60.0)
    assert estimate.num_ahead == 0 and estimate.wait_s == 0.0
    assert estimate.first_token_s < 0.1
    assert estimate.total_s == pytest.approx(estimate.first_token_s + 49 * 0.02, rel=0.01)
    assert estimate.long_total_s > estimate.total_s


def test_the_next_one_begins_when_the_first_place_becomes_free() -> None:
    made = forecast([], [RunningGroup(7, 100), RunningGroup(1, 30)])
    assert newcomer_s(made) == pytest.approx(30 * 0.02, abs=0.1)
    assert newcomer_s(made, num_added=1) > 1.0


def test_each_wave_takes_the_places_of_the_one_before() -> None:
    made = forecast(requests(24), [RunningGroup(8, 100)])
    assert made.num_waiting == 24
    first = [made.begins_s(number) for number in range(24)]
    assert first == sorted(first)
    assert first[0] == pytest.approx(2.0, abs=0.2)
    assert first[8] == pytest.approx(3.0, abs=0.3)
    assert first[16] == pytest.approx(4.0, abs=0.4)


def test_against_every_single_place() -> None:
    draw = random.Random(3)
    left = [draw.randint(1, 200) for _ in range(8)]
    outputs = [draw.randint(10, 90) for _ in range(60)]
    places = [0.02 * tokens for tokens in left]
    heapq.heapify(places)
    begun = []
    for tokens in outputs:
        at = heapq.heappop(places)
        begun.append(at)
        heapq.heappush(places, at + 0.02 * tokens)
    waiting = [WaitingGroup(0, number + 1, 1, 1, 1, tokens) for number, tokens in enumerate(outputs)]
    made = forecast(waiting, [RunningGroup(1, tokens) for tokens in left])
    assert [made.begins_s(number) for number in range(60)] == pytest.approx(begun, rel=0.1, abs=0.1)


def test_groups_say_nearly_what_single_requests_say() -> None:
    singly = forecast(requests(200), [RunningGroup(8, 60)])
    grouped = forecast(
        [WaitingGroup(0, number + 10, 10, 10, 1000, 500) for number in range(0, 200, 10)], [RunningGroup(8, 60)]
    )
    for number in (0, 50, 111, 199):
        assert grouped.begins_s(number) == pytest.approx(singly.begins_s(number), rel=0.1, abs=0.3)


def test_thousands_that_wait_are_served_as_fast_as_they_can_be() -> None:
    """In few steps: their groups take places that become free one after the other together."""
    size, outputs = 100, 50
    groups = [WaitingGroup(0, number, size, size, size, outputs * size) for number in range(100)]
    made = forecast(groups, [RunningGroup(1, tokens) for tokens in range(1, 9)])
    for number in (1000, 5000, 9999):
        assert made.begins_s(number) == pytest.approx(number / 8 * outputs * 0.02, rel=0.05)
    assert len(made._points) < 20 * len(groups)


@pytest.mark.parametrize("num_places", [4, 100])
def test_a_burst_upon_an_idle_fleet_is_served_place_by_place(num_places: int) -> None:
    """Those who came since the forecast was made, however many more than can run at a time."""
    made = forecast([], [], CAPACITY._replace(num_places=num_places))
    all_places, answer_s = 2 * num_places, 50 * 0.02
    for num_waves in (0.5, 1.5, 2.5, 4.5):
        waits_s = made.begins_s(num_waves * all_places)
        assert waits_s == pytest.approx(int(num_waves) * answer_s, abs=0.6 * answer_s)
    assert made.spacing_s == pytest.approx(answer_s / all_places, rel=0.1)


def test_a_worker_that_comes_up_shortens_the_wait() -> None:
    alone = forecast(requests(200), [RunningGroup(8, 50)])
    helped = forecast(requests(200), [RunningGroup(8, 50)], CAPACITY._replace(coming=(5.0, 5.0)))
    assert helped.begins_s(30) == pytest.approx(alone.begins_s(30), rel=0.05)
    assert helped.begins_s(199) < 0.7 * alone.begins_s(199)


def test_scaled_to_zero_everybody_waits_for_the_first_worker() -> None:
    waking = CAPACITY._replace(num_ready=0, coming=(30.0,))
    assert newcomer_s(forecast([], [], waking)) == pytest.approx(30.0, abs=0.5)
    assert make_forecast([], [], CAPACITY._replace(num_ready=0), MIX) is None


def test_prompts_are_computed_one_after_the_other() -> None:
    slow_prompts = CAPACITY._replace(speed=EngineSpeed(0.001, 0.0, 0.01), num_ready=1, num_places=64)
    made = forecast(requests(10), [], slow_prompts)
    assert made.begins_s(9) == pytest.approx(9.0, rel=0.15)
    cached = forecast(requests(10), [], slow_prompts, share=0.1)
    assert cached.begins_s(9) == pytest.approx(0.9, rel=0.3)


def test_a_place_in_the_queue_is_found_by_its_sequence() -> None:
    made = forecast([WaitingGroup(0, 10, 5, 5, 500, 250), WaitingGroup(0, 20, 5, 5, 500, 250)], [RunningGroup(8, 50)])
    assert made.num_ahead_of(0, "", 10) == 0
    assert made.num_ahead_of(0, "", 11) == 5
    assert made.num_ahead_of(0, "", 21) is None
    assert made.num_ahead_of(0, "nobody", 5) is None


def test_more_running_than_places_is_no_capacity() -> None:
    """Workers are sent some sequences more than they run at a time."""
    made = forecast(requests(4), [RunningGroup(9, 50)])
    exact = forecast(requests(4), [RunningGroup(8, 50)])
    assert made.begins_s(3) >= exact.begins_s(3)
    assert made.begins_s(0) < 3.0
