"""What routers hear of each other over the bus."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from headrace_router.capacities import Capacities
from headrace_router.promises import LATE_S, Promises
from headrace_router.queue_watch import QueueWatch
from headrace_shared.codec import encode
from headrace_shared.fleet_messages import RouterLoad, RunningGroup
from headrace_shared.memory_bus import MemoryBroker, MemoryBus
from headrace_shared.messages import Lane, RouterId
from headrace_shared.subjects import loads_subject
from tests.byte_model import MODEL
from tests.router.fleets import load_of, prompt_of, waiting
from tests.router.support import until

DIGEST = b"12345678"


class Listening:
    def __init__(self, broker: MemoryBroker, name: str) -> None:
        self.bus = MemoryBus(broker)
        self.promises = Promises()
        self.watch = QueueWatch(self.bus, RouterId(name), Capacities(), self.promises)


@contextlib.asynccontextmanager
async def two_routers() -> AsyncIterator[tuple[Listening, Listening]]:
    broker = MemoryBroker()
    routers = Listening(broker, "router-1"), Listening(broker, "router-2")
    for router in routers:
        await router.watch.open()
    tasks = [asyncio.create_task(router.watch.run()) for router in routers]
    try:
        yield routers
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_bookings_and_those_who_come_back_are_known_to_all() -> None:
    async with two_routers() as (here, there):
        wait_s = here.promises.book(MODEL, DIGEST, 0.1, 1.0, asyncio.get_running_loop().time())
        here.watch.promised(MODEL, DIGEST, wait_s)
        await until(lambda: len(there.promises) == 1)
        assert there.watch.queue(MODEL).depth.num_requests == 0
        assert there.promises.is_due(DIGEST, asyncio.get_running_loop().time() + LATE_S / 2)
        here.watch.kept(DIGEST)
        await until(lambda: len(there.promises) == 0)


async def test_numbers_are_told_of_requests_that_came_and_went_between_two_reports() -> None:
    """Else all of them would look new when the other router gets its next request."""
    async with two_routers() as (here, there):
        heard: list[int] = []
        await there.bus.subscribe(loads_subject(RouterId("router-1")), lambda message: heard.append(1))
        prompt = prompt_of(Lane.INTERACTIVE, sequence=4711)
        here.watch.queued(prompt, lambda error: None)
        here.watch.closed(prompt)
        await until(lambda: there.watch.newest_sequence == 4711)
        await asyncio.sleep(0.6)
        assert len(heard) == 1, "then there is nothing to say"
        assert there.watch.newest_sequence == 4711


async def test_impossible_loads_are_not_taken_for_a_queue() -> None:
    async with two_routers() as (here, there):
        bad = RouterLoad(router=RouterId("router-9"), model=MODEL, running=(RunningGroup(1 << 60, 1),))
        here.bus.publish(loads_subject(bad.router), encode(bad))
        good = load_of("router-8", waiting(3), model="other")
        here.bus.publish(loads_subject(good.router), encode(good))
        await until(lambda: there.watch.models == ["other"])
