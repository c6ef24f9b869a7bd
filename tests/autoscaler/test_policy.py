from math import ceil, pi, sin

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_autoscaler.observation import Observation
from headrace_autoscaler.policy import Decision, Limits, State, decide
from tests.autoscaler.virtual_fleet import Run, simulate

LIMITS = Limits(min_workers=1, max_workers=8, scale_down_after_s=60.0, target_load=1.0)


def observe(num_waiting: int = 0, num_running: int = 0, num_ready: int = 1, capacity: int = 10) -> Observation:
    return Observation(num_ready, num_waiting, num_running, capacity)


def steps(observations: list[Observation], limits: Limits = LIMITS, period_s: float = 5.0) -> list[Decision]:
    state, decisions = State(), []
    for number, observation in enumerate(observations):
        decision, state = decide(observation, limits, state, number * period_s)
        decisions.append(decision)
    return decisions


@pytest.mark.parametrize(
    ("num_waiting", "num_running", "expected"),
    [(0, 0, 1), (0, 10, 1), (1, 10, 2), (35, 5, 4), (36, 5, 5), (10_000, 0, 8)],
)
def test_work_over_capacity_within_limits(num_waiting: int, num_running: int, expected: int) -> None:
    decisions = steps([observe(num_waiting, num_running)] * 4)
    assert decisions[-1].desired == expected
    assert decisions[0].desired <= 3  # each step at most doubles


def test_work_that_waits_brings_more_at_once_and_work_that_runs_after_a_while() -> None:
    assert steps([observe(num_waiting=5, num_running=10)])[0].desired == 2
    running = steps([observe(num_running=15)] * 6)
    assert [decision.desired for decision in running] == [1, 1, 1, 1, 2, 2]


def test_down_to_the_most_that_was_needed_in_the_window() -> None:
    observations = [observe(40), observe(40), observe(20), *[observe(num_running=8)] * 40]
    decisions = steps([observation._replace(num_ready=4) for observation in observations])
    desired = [decision.desired for decision in decisions]
    assert desired[:14] == [4] * 14  # 60 s after the need for four
    assert desired[14:26] == [3] * 12  # 60 s after the need for two, with a margin, and for a minute
    assert desired[26:] == [2] * 12 + [1] * (len(desired) - 38)
    assert "1 would do, waiting" in decisions[5].reason


def test_nothing_goes_while_requests_wait_for_what_is_on_its_way() -> None:
    waiting = observe(num_waiting=9, num_running=1, num_ready=1)._replace(num_starting=2, oldest_wait_s=5.0)
    assert {decision.desired for decision in steps([waiting] * 40)} == {3}
    assert steps([*[waiting] * 40, observe(num_running=9, num_ready=3)])[-1].desired == 2


def test_a_new_policy_keeps_the_workers_there_are_for_a_whole_window() -> None:
    decisions = steps([observe(num_ready=5)] * 14)
    assert [decision.desired for decision in decisions] == [5] * 12 + [4, 4]


def test_a_large_fleet_does_not_grow_by_a_worker_or_two_while_nothing_waits() -> None:
    limits = LIMITS._replace(max_workers=1000)
    desired = {}
    for num_running, num_waiting in ((1010, 0), (1040, 0), (1010, 5)):
        observation = observe(num_waiting, num_running, num_ready=100)
        desired[num_running, num_waiting] = steps([observation] * 12, limits)[-1].desired
    assert desired == {(1010, 0): 100, (1040, 0): 104, (1010, 5): 102}


def test_few_workers_go_at_a_time_and_then_none_for_a_minute() -> None:
    limits = LIMITS._replace(max_workers=1000, scale_down_after_s=100.0)
    desired = [decision.desired for decision in steps([observe(num_running=100, num_ready=500)] * 60, limits)]
    assert desired[:20] == [500] * 20
    assert desired[20:32] == [450] * 12 and desired[32:44] == [405] * 12 and desired[44] == 365


def test_where_the_load_is_known_the_time_that_requests_take_does_not_matter() -> None:
    """Twice as many sequences that each take twice as long are the same load."""
    limits = LIMITS._replace(max_workers=100)
    desired = []
    for num_running in (50, 100):
        observations = [Observation(10, 0, num_running, 20, num_arrived=50 * number, load=0.5) for number in range(80)]
        desired.append(steps(observations, limits)[-1].desired)
    assert desired == [6, 6]  # of ten that are half used, with a margin


def test_no_worker_goes_while_anything_waits() -> None:
    limits = LIMITS._replace(scale_down_after_s=5.0)
    waiting = [Observation(3, 1, 2, 4, num_arrived=4 * number, load=0.01) for number in range(40)]
    assert {decision.desired for decision in steps(waiting, limits)} == {3}
    assert steps([*waiting, waiting[-1]._replace(num_waiting=0)], limits)[-1].desired == 2


def test_a_load_that_only_an_average_still_knows_keeps_no_worker() -> None:
    limits = LIMITS._replace(min_workers=0, scale_down_after_s=5.0, scale_to_zero_after_s=10.0)
    busy = [Observation(1, 0, 4, 4, num_arrived=4 * number, load=0.8) for number in range(40)]
    idle = [Observation(1, 0, 0, 4, num_arrived=160, load=0.8 * 0.8**number) for number in range(6)]
    assert steps([*busy, *idle], limits)[-1].desired == 0


def test_a_load_above_what_is_planned_with_brings_workers_though_places_are_free() -> None:
    limits = LIMITS._replace(max_workers=100, target_load=0.9)
    observations = [Observation(10, 0, 40, 20, num_arrived=50 * number, load=0.99) for number in range(40)]
    assert steps(observations, limits)[-1].desired == 11


def test_fewer_workers_that_prove_too_few_are_tried_again_only_after_longer() -> None:
    quiet, busy = observe(num_running=4, num_ready=2), observe(num_waiting=5, num_running=10, num_ready=2)
    desired = [decision.desired for decision in steps([*[quiet] * 13, busy, *[quiet] * 40])]
    assert desired[11:14] == [2, 1, 2]
    assert desired[14:49] == [2] * 35 and desired[50] == 1


def test_an_unknown_capacity_changes_nothing_but_wakes_a_model() -> None:
    assert steps([observe(num_waiting=100, num_ready=2, capacity=0)])[0].desired == 2
    limits = LIMITS._replace(min_workers=0)
    asleep = observe(num_ready=0, capacity=0)
    assert steps([asleep] * 2, limits)[-1].desired == 0
    assert steps([asleep, asleep._replace(num_waiting=1)], limits)[-1].desired == 1


def test_a_request_delivered_to_nobody_wakes_a_model_that_has_no_worker() -> None:
    decision = steps([observe(num_running=1, num_ready=0)], LIMITS._replace(min_workers=0))[0]
    assert decision.desired == 1


def test_the_last_worker_stays_while_requests_run_and_for_a_while_after() -> None:
    limits = Limits(min_workers=0, scale_down_after_s=10.0, scale_to_zero_after_s=20.0)
    decisions = steps([*[observe(num_running=4)] * 20, *[observe()] * 6], limits)
    assert [decision.desired for decision in decisions] == [1] * 23 + [0] * 3


def test_a_request_between_two_looks_keeps_the_last_worker() -> None:
    limits = Limits(min_workers=0, scale_down_after_s=10.0, scale_to_zero_after_s=20.0)
    decisions = steps([observe()._replace(num_arrived=number // 3) for number in range(20)], limits)
    assert {decision.desired for decision in decisions} == {1}


def test_a_queue_that_cannot_be_read_lowers_nothing_and_the_window_starts_anew() -> None:
    quiet = observe(num_ready=4)
    lost = quiet._replace(num_waiting=None)
    decisions = steps([*[quiet] * 11, *[lost] * 40, *[quiet] * 13])
    assert [decision.desired for decision in decisions] == [4] * 63 + [3]
    assert decisions[20].is_frozen and not decisions[5].is_frozen


def test_workers_beyond_the_limit_are_not_taken_away_blindly() -> None:
    assert steps([observe(num_ready=12)._replace(num_running=None)])[0].desired == 12


def test_late_requests_bring_one_more_even_if_the_figures_say_it_is_enough() -> None:
    late = observe(num_waiting=2, num_running=2)._replace(oldest_wait_s=30.0)
    desired = [decision.desired for decision in steps([late, late._replace(num_starting=1), *[observe()] * 5])]
    assert desired == [2, 2, 2, 2, 2, 2, 2]


def test_late_first_tokens_without_a_queue_show_what_a_worker_can_do_in_time() -> None:
    late = observe(num_running=6)._replace(ttft_s=9.0)
    decisions = steps([late] * 20)
    assert decisions[11].desired == 1  # what waited before may be why
    assert decisions[-1].desired == 2 and "5.4" in decisions[-1].reason
    assert steps([late._replace(gpu_utilization=0.1)] * 20)[-1].desired == 1  # the GPU is not what makes them late
    assert "10 at a time" in steps([late._replace(num_starting=1)] * 20)[-1].reason


def test_memory_that_fills_before_the_places_do_is_the_capacity() -> None:
    full = observe(num_running=4)._replace(kv_use=1.0, batch_occupancy=0.4)
    assert steps([full._replace(num_waiting=4)] * 3)[-1].desired == 2


def test_long_prompts_that_wait_count_by_their_tokens() -> None:
    waiting = observe(num_waiting=2)._replace(num_waiting_tokens=40_000, worker_tokens_per_s=1000.0)
    assert steps([waiting] * 4)[-1].desired == 8
    assert steps([waiting._replace(num_waiting_tokens=4000)])[0].desired == 1


def test_the_cost_limits_the_workers() -> None:
    limits = LIMITS._replace(cost_per_worker_hour=2.5, max_cost_per_hour=8.0)
    decision = steps([observe(num_waiting=100)] * 5, limits)[-1]
    assert decision.desired == 3 and decision.cost_per_hour == 7.5
    assert "3 of 10, the most allowed" in decision.reason


def test_the_reason_says_why_in_one_line() -> None:
    decision = steps([observe(num_waiting=30, num_running=5)])[0]
    assert decision.reason == "35 requests (30 waiting), 10 at a time on a worker; 1 -> 3 of 4"


def test_the_warm_pool_follows_work_and_stays_within_what_may_run() -> None:
    limits = LIMITS._replace(max_parked=2)
    assert steps([observe()], limits)[0].parked == 0
    assert steps([observe(num_running=5)], limits)[0].parked == 1
    assert steps([observe(num_waiting=90, num_ready=8)], limits)[0].parked == 0
    assert steps([observe()], limits._replace(min_parked=1))[0].parked == 1


ANY_FIGURE = st.none() | st.floats(0, 1)


@given(
    st.lists(
        st.tuples(
            st.none() | st.integers(0, 1000),
            st.integers(0, 1000),
            st.integers(0, 20),
            st.integers(0, 50),
            st.integers(0, 3),
            st.none() | st.integers(0, 5000),
            ANY_FIGURE,
            ANY_FIGURE,
            st.none() | st.floats(0, 100),
        ),
        max_size=40,
    ),
    st.integers(0, 3),
    st.floats(0.1, 200),
)
def test_whatever_is_seen_the_limits_hold(
    seen: list[tuple[int | None, int, int, int, int, int | None, float | None, float | None, float | None]],
    min_workers: int,
    period_s: float,
) -> None:
    limits = LIMITS._replace(min_workers=min_workers, max_parked=2)
    state = State()
    for number, (waiting, running, ready, capacity, starting, arrived, kv, occupancy, ttft) in enumerate(seen):
        observation = Observation(
            ready,
            waiting,
            running,
            capacity,
            starting,
            num_arrived=arrived,
            kv_use=kv,
            batch_occupancy=occupancy,
            ttft_s=ttft,
            oldest_wait_s=float(waiting or 0),
            warm_up_s=30.0,
        )
        before = state.desired
        decision, state = decide(observation, limits, state, number * period_s)
        if waiting is None:
            assert decision.is_frozen and decision.desired >= (before or 0)
        else:
            assert min_workers <= decision.desired <= limits.max_workers
            assert decision.desired or not (waiting + running)
            assert decision.desired + decision.parked <= max(limits.max_workers, decision.desired)
        assert "\n" not in decision.reason and len(decision.reason) < 300
        assert len(state.needed.peaks) < 200


@given(st.lists(st.integers(0, 30), min_size=30, max_size=200))
def test_never_fewer_than_were_needed_within_the_window(work: list[int]) -> None:
    decisions = steps([observe(num_running=count) for count in work])
    for number, decision in enumerate(decisions[12:], start=12):
        recent = [ceil(count / 10) for count in work[number - 11 : number + 1]]
        if decision.desired < decisions[number - 1].desired:
            assert decision.desired >= max(recent)


def changes_per_hour(run: Run, since_s: float, until_s: float) -> float:
    return sum(since_s <= change.at < until_s for change in run.changes) / (until_s - since_s) * 3600


def test_a_steady_load_for_two_and_a_half_workers_settles_at_three_and_stays() -> None:
    limits = Limits(max_workers=20)
    run = simulate(lambda _: 16.0, lambda _: 10.0, limits=limits, seconds=3600, capacity=64, is_random=False)
    assert run.desired_at(1200) == 3
    assert changes_per_hour(run, 1200, 3600) <= 2
    assert run.share_within(2.0) > 0.9  # but for the cold start


@settings(max_examples=6, deadline=None)
@given(st.floats(0.5, 12.0), st.floats(2.0, 30.0))
def test_no_oscillation_under_a_steady_load(rate: float, duration_s: float) -> None:
    run = simulate(
        lambda _: rate,
        lambda source: source.expovariate(1 / duration_s),
        limits=Limits(max_workers=60),
        seconds=3 * 3600,
        capacity=16,
    )
    assert changes_per_hour(run, 3600, 3 * 3600) <= 2


def test_a_rising_load_is_met_ahead_of_time() -> None:
    limits = Limits(max_workers=40)
    run = simulate(lambda now: 1 + now / 300, lambda _: 10.0, limits=limits, seconds=3600, warm_up_s=90.0, num_ready=2)
    assert run.share_within(2.0) > 0.98
    assert run.desired_at(3599) <= 2 * ceil((1 + 12) * 10 / 10 / 0.9)


def test_a_day_in_an_hour_costs_far_less_than_its_peak() -> None:
    run = simulate(
        lambda now: 5.5 + 4.5 * sin(2 * pi * now / 7200 - pi / 2),
        lambda source: source.expovariate(0.1),
        limits=Limits(max_workers=40),
        seconds=2 * 7200,
        warm_up_s=60.0,
    )
    peak = max(change.desired for change in run.changes)
    assert run.share_within(2.0) > 0.985 and run.num_left < 10
    assert run.worker_s < 0.75 * peak * 2 * 7200


def test_a_burst_of_short_requests_does_not_bring_a_worker_for_each() -> None:
    run = simulate(
        lambda now: 400.0 if 600 <= now < 602 else 1.0,
        lambda _: 5.0,
        limits=Limits(max_workers=1000),
        seconds=1500,
    )
    assert max(change.desired for change in run.changes) < 40  # ten times as many could run them all at once
    assert run.num_left == 0


def test_a_model_at_zero_wakes_for_one_request_and_sleeps_again() -> None:
    run = simulate(
        lambda now: 5.0 if 1000 <= now < 1001 else 0.0,
        lambda _: 5.0,
        limits=Limits(min_workers=0, scale_down_after_s=60, scale_to_zero_after_s=120),
        seconds=1500,
        num_ready=0,
    )
    assert [change.desired for change in run.changes] == [0, 1, 0]
    assert 1000 <= run.changes[1].at <= 1006 and run.num_left == 0 and max(run.waits) < 40
