"""What all routers tell, and what the broker says is there, as one queue."""

from headrace_router.forecast import Capacity
from headrace_router.model_queue import LOAD_TIMEOUT_S, ModelQueue
from headrace_shared.engine_speed import EngineSpeed
from headrace_shared.messages import RouterId
from tests.router.fleets import load_of, waiting

CAPACITY = Capacity(num_ready=1, num_places=4, num_tokens=256, speed=EngineSpeed(0.02, 0.0, 0.0))


def refreshed(queue: ModelQueue, now: float) -> int:
    queue.refresh(lambda mix: CAPACITY, now)
    return queue.depth.num_requests


def test_others_count_until_nothing_is_heard_of_them() -> None:
    queue = ModelQueue(RouterId("own"))
    queue.on_load(load_of("router-2", waiting(10)), 0.0)
    queue.on_load(load_of("router-3", waiting(5)), 1.0)
    assert refreshed(queue, 1.0) == 15
    queue.on_load(load_of("router-3", waiting(2)), 2.0)
    assert refreshed(queue, 2.0) == 12
    assert refreshed(queue, 1.0 + LOAD_TIMEOUT_S) == 2


def test_what_a_dead_router_left_is_found_in_the_brokers_depth() -> None:
    queue = ModelQueue(RouterId("own"))
    queue.on_load(load_of("router-2", waiting(10)), 0.0)
    queue.on_depth(50)
    assert refreshed(queue, 0.1) == 10, "once may be a moment's difference"
    queue.on_depth(48)
    assert 10 + 30 <= refreshed(queue, 0.2) <= 48
    queue.on_depth(10)
    assert refreshed(queue, 0.3) == 10


def test_a_few_that_are_just_ending_are_nobodys_wait() -> None:
    queue = ModelQueue(RouterId("own"))
    for _ in range(3):
        queue.on_depth(3)
    assert refreshed(queue, 0.1) == 0
