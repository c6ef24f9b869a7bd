import asyncio

from headrace_autoscaler.driver import Instance, NoCapacity
from headrace_autoscaler.sharing import Share, caps
from headrace_shared.memory_bus import MemoryBus
from headrace_shared.messages import Lane, WorkerId
from headrace_shared.subjects import queues_of, requests_stream
from tests.autoscaler.bench import LIMITS, PLANS, running, until
from tests.autoscaler.talking_engine import TalkingEngine
from tests.queues import request_subject

HAS = Share(desired=4, ready=3, coming=1, leaving=0, is_full=False)
STARVED = Share(desired=1, ready=0, coming=0, leaving=0, is_full=True)


def test_with_room_for_all_nobody_is_limited() -> None:
    assert caps({}) == {} and caps({"a": HAS, "b": HAS._replace(is_full=True)}) == {}
    assert caps({"a": HAS, "b": STARVED._replace(desired=0)}) == {}
    assert caps({"a": HAS, "b": STARVED._replace(coming=1)}) == {}


def test_the_largest_gives_one_up_at_a_time_and_nobody_else_grows() -> None:
    small = HAS._replace(ready=1, coming=0, desired=9)
    assert caps({"a": HAS, "b": small, "c": STARVED}) == {"a": 3, "b": 1}
    assert caps({"a": HAS._replace(leaving=1), "c": STARVED}) == {"a": 4}
    assert caps({"b": small, "c": STARVED}) == {"b": 1}


class SmallEngine(TalkingEngine):
    """Has room for two workers."""

    async def start(self, model: str, worker: WorkerId, generation: int, parked: bool = False) -> Instance:
        if worker not in self.workers and len(self.workers) >= 2:
            raise NoCapacity("2 workers run, as many as may")
        return await super().start(model, worker, generation, parked)


async def test_a_model_that_is_asked_for_gets_a_worker_from_one_that_has_all_of_them() -> None:
    bus = MemoryBus()
    await bus.ensure_stream(requests_stream(1000, 1 << 20))
    for model in ("a", "b"):
        for lane in Lane:
            for queue in queues_of(model, lane, 0):
                await bus.ensure_consumer(queue.consumer)
    for number in range(40):
        await bus.enqueue(request_subject("a", Lane.INTERACTIVE, 0), b"x", message_id=f"a{number}")
    engine = SmallEngine(bus)
    plans = PLANS._replace(models=("a", "b"), limits=LIMITS._replace(min_workers=0))
    try:
        async with running(bus, plans, engine):
            await until(lambda: engine.num_ready == 2)
            await bus.enqueue(request_subject("b", Lane.INTERACTIVE, 0), b"x", message_id="b")

            def is_shared() -> bool:
                models = {each.instance().model for each in engine.workers.values()}
                return models == {"a", "b"} and engine.num_ready == 2

            await until(is_shared, 40)
            await asyncio.sleep(1.0)
            assert is_shared()
    finally:
        await engine.close()
