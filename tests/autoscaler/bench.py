"""An autoscaler on a broker that requests are put into by hand."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

from headrace_autoscaler.control import Plans
from headrace_autoscaler.policy import Limits
from headrace_autoscaler.service import Autoscaler
from headrace_shared.bus import Bus, Delivery
from headrace_shared.messages import Lane
from headrace_shared.service import Service
from headrace_shared.subjects import Queue, queues_of, requests_stream
from tests.autoscaler.talking_engine import TalkingEngine
from tests.queues import request_subject

LIMITS = Limits(1, 4, scale_down_after_s=1.0, scale_up_after_s=0.2, scale_to_zero_after_s=1.0, target_load=1.0)
PLANS = Plans(LIMITS, period_s=0.1, models=("tiny",), settle_s=0.3)


async def prepare(bus: Bus) -> None:
    await bus.ensure_stream(requests_stream(1000, 1 << 20))
    for lane in Lane:
        for queue in queues_of("tiny", lane, 0):
            await bus.ensure_consumer(queue.consumer)


async def ask(bus: Bus, num_requests: int) -> None:
    for number in range(num_requests):
        await bus.enqueue(request_subject("tiny", Lane.INTERACTIVE, 0), b"x", message_id=f"m{number}-{time.time()}")


async def take(bus: Bus) -> Delivery | None:
    return await bus.pull(Queue("tiny", Lane.INTERACTIVE).consumer, 0.1)


async def until(is_so: Callable[[], bool], timeout_s: float = 60.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not is_so():  # noqa: ASYNC110 - of things that set no event
            await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def running(bus: Bus, plans: Plans, engine: TalkingEngine | None, name: str = "a1") -> AsyncIterator[Autoscaler]:
    service = Service("autoscaler", name)
    autoscaler = Autoscaler(service, bus, plans, engine)
    run = asyncio.create_task(service.run(lambda _: autoscaler.run(), drain_timeout_s=5))
    try:
        yield autoscaler
        assert not run.done()
    finally:
        service.drain()
        assert await asyncio.wait_for(run, 10) == 0
