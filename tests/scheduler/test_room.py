"""What the core tells intake: how many more requests it wants, and which workers have something to do."""

from headrace_scheduler.decisions import SchedulerConfig
from headrace_scheduler.scheduler import Scheduler
from tests.scheduler.builders import NOW, W1, add, advance, facts, request, scheduler, step


def test_there_is_no_room_without_a_worker_and_less_with_each_that_waits() -> None:
    made = Scheduler()
    assert made.room() == 0
    made.add_worker(W1, facts(num_blocks=64, max_sequences=16), (), NOW)
    room = made.room()
    assert 16 <= room <= 24
    add(made, request("a", num_choices=3))
    assert made.room() == room - 3
    step(made)
    assert made.num_waiting == 2
    made.set_accepting(W1, False)
    assert made.room() == 0


def test_a_full_worker_leaves_a_small_window() -> None:
    made = scheduler(facts(num_blocks=8, max_sequences=64))
    add(made, request("a", prompt=100, max_tokens=20))
    step(made)
    assert made.room() == 16


def test_the_window_is_bounded_by_configuration() -> None:
    made = scheduler(facts(max_sequences=64), config=SchedulerConfig(max_waiting=5))
    assert made.room() == 5


def test_a_stalled_sequence_is_not_runnable() -> None:
    made = scheduler(facts(num_blocks=8), config=SchedulerConfig(horizon_blocks=1))
    add(made, request("a", prompt=40, max_tokens=80), request("b", prompt=40, max_tokens=80, seed=2))
    step(made)
    assert made.gauges().workers[W1].num_runnable == 2
    advance(made, 2, 64, *range(25))
    assert made.gauges().workers[W1].num_runnable == 1
