import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_autoscaler.policy import Decision, Limits, Observation, State, decide

LIMITS = Limits(min_workers=1, max_workers=8, scale_down_after_s=60.0)


def observe(num_waiting: int = 0, num_running: int = 0, num_workers: int = 1, worker_capacity: int = 10) -> Observation:
    return Observation(num_workers, num_waiting, num_running, worker_capacity)


def desired(observation: Observation) -> int:
    return decide(observation, LIMITS, State(), now=0)[0].desired


@pytest.mark.parametrize(
    ("num_waiting", "num_running", "expected"),
    [(0, 0, 1), (0, 10, 1), (1, 10, 2), (35, 5, 4), (36, 5, 5), (10_000, 0, 8)],
)
def test_work_over_capacity_within_limits(num_waiting: int, num_running: int, expected: int) -> None:
    assert desired(observe(num_waiting, num_running)) == expected


def test_up_at_once_and_down_after_a_while() -> None:
    decision, state = decide(observe(num_waiting=40), LIMITS, State(), now=0)
    assert decision.desired == 4
    decision, state = decide(observe(num_waiting=10), LIMITS, state, now=10)
    assert decision.desired == 4 and "1 would be enough, waiting 60 s more" in decision.reason
    decision, state = decide(observe(num_waiting=20), LIMITS, state, now=69)
    assert decision.desired == 4
    decision, state = decide(observe(num_waiting=20), LIMITS, state, now=70)
    assert decision.desired == 2
    assert decide(observe(num_waiting=30), LIMITS, state, now=71)[0].desired == 3


def test_a_burst_restarts_the_wait() -> None:
    _, state = decide(observe(num_waiting=40), LIMITS, State(), now=0)
    _, state = decide(observe(num_waiting=10), LIMITS, state, now=10)
    _, state = decide(observe(num_waiting=40), LIMITS, state, now=50)
    decision, _ = decide(observe(num_waiting=10), LIMITS, state, now=71)
    assert decision.desired == 4


def test_a_new_policy_respects_the_workers_there_are() -> None:
    decision, state = decide(observe(num_workers=5), LIMITS, State(), now=0)
    assert decision.desired == 5
    assert decide(observe(num_workers=5), LIMITS, state, now=60)[0].desired == 1


def test_an_unknown_capacity_changes_nothing_but_wakes_a_model() -> None:
    assert desired(observe(num_waiting=100, num_workers=2, worker_capacity=0)) == 2
    limits = LIMITS._replace(min_workers=0)
    asleep = observe(num_workers=0, worker_capacity=0)
    assert decide(asleep, limits, State(), 0)[0].desired == 0
    assert decide(asleep._replace(num_waiting=1), limits, State(), 0)[0].desired == 1


def test_nobody_is_wanted_back_while_the_last_workers_leave() -> None:
    limits = LIMITS._replace(min_workers=0)
    _, state = decide(observe(num_running=1), limits, State(), now=0)
    _, state = decide(observe(), limits, state, now=10)
    decision, state = decide(observe(), limits, state, now=70)
    assert decision.desired == 0
    assert decide(observe(num_workers=1), limits, state, now=75)[0].desired == 0


def test_the_reason_says_why() -> None:
    decision, _ = decide(observe(num_waiting=200, num_running=5), LIMITS, State(), 0)
    assert decision == Decision(8, "205 requests, 10 at a time on a worker; 21 is outside 1 to 8")


@given(
    st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 1000), st.integers(0, 20), st.integers(0, 50)), max_size=30)
)
def test_always_within_limits_and_never_below_the_work(steps: list[tuple[int, int, int, int]]) -> None:
    state = State()
    for now, (num_waiting, num_running, num_workers, capacity) in enumerate(steps):
        observation = Observation(num_workers, num_waiting, num_running, capacity)
        decision, state = decide(observation, LIMITS, state, float(now * 7))
        assert LIMITS.min_workers <= decision.desired <= LIMITS.max_workers
        if capacity:
            assert decision.desired * capacity >= num_waiting + num_running or decision.desired >= LIMITS.max_workers
