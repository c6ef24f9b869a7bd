"""What all routers tell, and what the broker says is there, as one queue."""

import math

import pytest

from headrace_router.arrivals import Arrivals
from headrace_router.forecast import Capacity
from headrace_router.model_queue import ModelQueue
from headrace_router.peer_loads import LOAD_TIMEOUT_S, MAX_TOLD, is_plausible
from headrace_shared.engine_speed import EngineSpeed
from headrace_shared.fleet_messages import RouterLoad, RunningGroup, WaitingGroup
from headrace_shared.messages import Lane, RouterId
from tests.byte_model import MODEL
from tests.router.fleets import load_of, prompt_of, waiting

CAPACITY = Capacity(num_ready=1, num_places=4, num_tokens=256, speed=EngineSpeed(0.02, 0.0, 0.0))


def refreshed(queue: ModelQueue, now: float) -> int:
    queue.refresh(lambda mix: CAPACITY, now)
    return queue.depth.num_requests


def test_others_count_until_nothing_is_heard_of_them() -> None:
    queue = ModelQueue(RouterId("own"), MODEL, Arrivals())
    queue.on_load(load_of("router-2", waiting(10)), 0.0)
    queue.on_load(load_of("router-3", waiting(5)), 1.0)
    assert refreshed(queue, 1.0) == 15
    queue.on_load(load_of("router-3", waiting(2)), 2.0)
    assert refreshed(queue, 2.0) == 12
    assert refreshed(queue, 1.0 + LOAD_TIMEOUT_S) == 2


def test_what_a_dead_router_left_is_found_in_the_brokers_depth() -> None:
    queue = ModelQueue(RouterId("own"), MODEL, Arrivals())
    queue.on_load(load_of("router-2", waiting(10)), 0.0)
    queue.on_depth(50)
    assert refreshed(queue, 0.1) == 10, "once may be a moment's difference"
    queue.on_depth(48)
    assert 10 + 30 <= refreshed(queue, 0.2) <= 48
    queue.on_depth(10)
    assert refreshed(queue, 0.3) == 10


def test_what_another_router_has_just_queued_is_not_lost() -> None:
    """The broker knows of it before we do."""
    arrivals = Arrivals()
    queue = ModelQueue(RouterId("own"), MODEL, arrivals)
    arrivals.add(100, (MODEL, False))
    queue.on_load(load_of("router-2", waiting(10), newest_sequence=100), 0.0)
    refreshed(queue, 0.0)
    for second in range(3):
        arrivals.hear(150)
        queue.on_depth(10 + 50)
        assert refreshed(queue, 0.1 * second) == 10
    queue.on_depth(10 + 50 + 40)
    queue.on_depth(10 + 50 + 40)
    assert refreshed(queue, 1.0) > 10


def test_who_fell_silent_has_not_queued_what_others_did() -> None:
    arrivals = Arrivals()
    queue = ModelQueue(RouterId("own"), MODEL, arrivals)
    arrivals.add(100, (MODEL, False))
    queue.on_load(load_of("router-2", newest_sequence=100), 0.0)
    queue.on_load(load_of("router-3", waiting(5), newest_sequence=300), 1.0)
    arrivals.hear(300)
    refreshed(queue, 1.0)
    assert queue.queued(prompt_of(Lane.INTERACTIVE, 301), 1.0, lambda error: None).predicted is not None
    assert queue.place(prompt_of(Lane.INTERACTIVE, 301).request, 301, 10, 1.0).position == 5 + 1


def test_a_few_that_are_just_ending_are_nobodys_wait() -> None:
    queue = ModelQueue(RouterId("own"), MODEL, Arrivals())
    for _ in range(3):
        queue.on_depth(3)
    assert refreshed(queue, 0.1) == 0


def test_what_most_of_the_refused_bear_is_known_for_a_while() -> None:
    queue = ModelQueue(RouterId("own"), MODEL, Arrivals())
    for number in range(19):
        queue.refused(5.0 + number, 0.0)
        queue.refused(0.0, 0.0)
    refreshed(queue, 1.0)
    assert queue.others_bear_s == math.inf, "few say nothing"
    for number in range(1000):
        queue.refused(10.0 + number % 100, 2.0)
    refreshed(queue, 3.0)
    assert 10.0 <= queue.others_bear_s <= 20.0
    refreshed(queue, 100.0)
    assert queue.others_bear_s == math.inf


def test_waits_in_the_batch_lane_say_nothing_of_others() -> None:
    """Whoever comes later goes before them."""
    for lane, is_taught in ((Lane.INTERACTIVE, True), (Lane.BATCH, False)):
        queue = ModelQueue(RouterId("own"), MODEL, Arrivals())
        queue.on_load(load_of("router-2", waiting(30, sequence=1)), 0.0)
        refreshed(queue, 0.0)
        prompt = prompt_of(lane, sequence=2)
        assert queue.queued(prompt, 0.0, lambda error: None).predicted is not None
        assert (queue.started(prompt.request.request_id, 60.0) is not None) is is_taught
        assert (queue.calibration.factor > 1.0) is is_taught


@pytest.mark.parametrize(
    "load",
    [
        load_of("r", WaitingGroup(0, 1, 1 << 62, 1 << 62, 10, 10)),
        load_of("r", WaitingGroup(0, 1, 5, 1, 10, 10)),
        load_of("r", WaitingGroup(0, 1, 0, 0, 10, 10)),
        load_of("r", WaitingGroup(0, 1, 1, 1, -5, 10)),
        load_of("r", WaitingGroup(0, 1, 1, 1, 10, 1 << 62)),
        load_of("r", WaitingGroup(0, 1, 1, 1, 10, 10, weight=math.nan)),
        load_of("r", WaitingGroup(0, 1, 1, 1, 10, 10, weight=-1.0)),
        load_of("r", *[waiting(MAX_TOLD // 2)] * 3),
        load_of("r", *[waiting(10_000)] * 300),
        RouterLoad(router=RouterId("r"), model=MODEL, running=(RunningGroup(-1, 5),)),
        RouterLoad(router=RouterId("r"), model=MODEL, running=(RunningGroup(1, -5),)),
    ],
)
def test_a_load_that_cannot_be_is_not_played_through(load: RouterLoad) -> None:
    assert not is_plausible(load)


def test_what_routers_do_have_is_believed() -> None:
    assert is_plausible(load_of("r", waiting(10_000), waiting(1)))
    assert is_plausible(RouterLoad(router=RouterId("r"), model=MODEL, running=(RunningGroup(8, 0),)))
    assert is_plausible(ModelQueue(RouterId("own"), MODEL, Arrivals()).load(32, b""))
