"""What workers and autoscaler say, put together."""

from typing import Any

import pytest

from headrace_router.capacities import AUTOSCALER_TIMEOUT_S, FIRST_START_S, FORGET_S, WORKER_TIMEOUT_S, Capacities
from headrace_router.forecast import Mix
from headrace_shared import telemetry
from headrace_shared.fleet_messages import Hello, Telemetry, WorkerState
from headrace_shared.messages import WorkerId
from headrace_shared.telemetry import of_model

MIX = Mix(100.0, 100.0)


def hello(worker: str = "w1", state: WorkerState = WorkerState.READY, **changes: Any) -> Hello:
    facts = {"num_blocks": 1000, "block_size": 16, "context": 1024, "max_sequences": 8, "tokens_per_iteration": 256}
    return Hello(worker=WorkerId(worker), model="m", state=state, epoch=1, **{**facts, **changes})


def figures(busy_s: float, iterations: float, outputs: float, prompts: float, running: float = 4.0) -> Telemetry:
    gauges = {
        telemetry.BUSY_S: busy_s,
        telemetry.NUM_ITERATIONS: iterations,
        telemetry.NUM_OUTPUT_TOKENS: outputs,
        telemetry.NUM_PREFILL_TOKENS: prompts,
        telemetry.NUM_RUNNING: running,
    }
    return Telemetry(service="worker", id="w1", state="ready", model="m", gauges=gauges)


def plans(**gauges: float) -> Telemetry:
    return Telemetry(
        service="autoscaler", id="a", state="ready", gauges={of_model(name, "m"): v for name, v in gauges.items()}
    )


def measured(now: float = 0.0) -> Capacities:
    capacities = Capacities()
    capacities.on_hello(hello(), now)
    for second in range(3):
        capacities.on_figures(figures(second * 1.0, second * 100.0, second * 400.0, second * 100.0), now + second)
    capacities.on_hello(hello(), now + 2.0)
    return capacities


def test_a_fleet_is_known_by_hellos_and_measured_by_figures() -> None:
    capacity = measured().of("m", MIX, 2.0)
    assert capacity is not None
    assert (capacity.num_ready, capacity.num_places, capacity.num_tokens, capacity.coming) == (1, 8, 256, ())
    assert capacity.speed.iteration_s(4, 1) == pytest.approx(0.01, rel=0.2)


def test_without_figures_nothing_is_known() -> None:
    capacities = Capacities()
    capacities.on_hello(hello(), 0.0)
    assert capacities.num_ready("m", 0.0) == 1
    assert capacities.of("m", MIX, 0.0) is None and capacities.of("other", MIX, 0.0) is None


def test_silent_leaving_and_draining_workers_do_not_count() -> None:
    capacities = measured()
    assert capacities.num_ready("m", 2.0 + WORKER_TIMEOUT_S + 0.1) == 0
    capacities.on_hello(hello(state=WorkerState.DRAINING), 3.0)
    assert capacities.num_ready("m", 3.0) == 0
    capacities.on_hello(hello(), 4.0)
    capacities.on_hello(hello(state=WorkerState.LEAVING), 4.5)
    assert not capacities.has_prospect("m", 4.5)


def test_a_small_cache_bounds_the_places() -> None:
    capacities = measured()
    capacities.on_hello(hello(num_blocks=40), 2.0)
    tight = capacities.of("m", Mix(100.0, 100.0), 2.0)
    assert tight is not None and 3 <= tight.num_places <= 4


def test_counters_that_begin_anew_are_no_work() -> None:
    capacities = measured()
    before = capacities.speed("m")
    capacities.on_figures(figures(0.0, 0.0, 0.0, 0.0), 3.0)
    assert capacities.speed("m") == before


def test_loading_workers_come_when_others_did() -> None:
    capacities = measured()
    capacities.on_hello(hello("w2", WorkerState.LOADING), 10.0)
    capacities.on_hello(hello(), 10.0)
    first = capacities.of("m", MIX, 10.0)
    assert first is not None and first.coming == (FIRST_START_S,)
    capacities.on_hello(hello("w2"), 14.0)  # it took 4 s
    capacities.on_hello(hello("w3", WorkerState.LOADING), 20.0)
    second = capacities.of("m", MIX, 21.0)
    assert second is not None and second.coming == (3.0,)


def test_the_autoscaler_tells_of_workers_that_nobody_has_heard_yet() -> None:
    capacities = measured()
    capacities.on_figures(plans(max_workers=4, coming_workers=2, coming_in_s=6.0), 2.0)
    capacity = capacities.of("m", MIX, 3.0)
    assert capacity is not None and capacity.coming == (5.0, 5.0)
    later = capacities.of("m", MIX, 3.0 + AUTOSCALER_TIMEOUT_S)
    assert later is not None and later.coming == ()


def test_a_model_at_zero_can_be_woken_only_where_somebody_would() -> None:
    capacities = measured()
    now = 60.0
    assert not capacities.has_prospect("m", now) and not capacities.can_wake("m", now)
    capacities.on_figures(plans(max_workers=0), now)
    assert not capacities.can_wake("m", now)
    capacities.on_figures(plans(max_workers=2, start_s=12.0), now)
    assert capacities.can_wake("m", now) and capacities.wakeable(now) == ["m"]
    capacity = capacities.of("m", MIX, now)
    assert capacity is not None and (capacity.num_ready, capacity.coming) == (0, (12.0,))


def test_after_an_outage_workers_get_the_time_to_be_heard_again() -> None:
    capacities = measured()
    assert capacities.num_ready("m", 100.0) == 0
    capacities.on_reconnect(100.0)
    assert capacities.num_ready("m", 101.0) == 1
    assert capacities.num_ready("m", 101.0 + WORKER_TIMEOUT_S) == 0


def test_who_wakes_a_model_may_count_on_as_many_places_as_there_were() -> None:
    """The last worker has left in good order. The next one is not taken for one that runs a single sequence."""
    capacities = measured()
    capacities.on_hello(hello(state=WorkerState.DRAINING), 3.0)
    capacities.on_hello(hello(state=WorkerState.LEAVING), 4.0)
    capacities.on_figures(plans(max_workers=2, start_s=12.0), 60.0)
    capacity = capacities.of("m", MIX, 60.0)
    assert capacity is not None and (capacity.num_places, capacity.num_tokens) == (8, 256)
    capacities.on_hello(hello("w2", WorkerState.LOADING, max_sequences=0, num_blocks=0), 70.0)
    capacity = capacities.of("m", MIX, 70.0)
    assert capacity is not None and capacity.num_places == 8


def test_workers_that_died_without_a_word_are_forgotten() -> None:
    capacities = Capacities()
    for number in range(500):
        capacities.on_hello(hello(f"w{number}"), float(number))
    assert len(capacities._workers) <= FORGET_S + 1
    assert capacities.num_ready("m", 499.0) == WORKER_TIMEOUT_S + 1
