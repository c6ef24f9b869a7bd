"""Takes from the queues of other schedulers what these have no room for, where we have nothing to do."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import structlog

from headrace_scheduler.queue_owners import to_steal
from headrace_shared.bus import Bus, Delivery
from headrace_shared.errors import BusError
from headrace_shared.messages import Lane, RequestId
from headrace_shared.subjects import REQUESTS, Queue

STEAL_S = 0.1
"""Pause before queues are looked at; it doubles while nothing is found, up to:"""
MAX_STEAL_S = 0.8
STOLEN_PULL_S = 0.2
"""How long a pull waits there: peers may have been faster."""

log = structlog.get_logger(__name__)


class Stealing:
    """`run` is its task; it returns once `is_over()`."""

    def __init__(
        self,
        bus: Bus,
        *,
        others: Callable[[], Sequence[Queue]],
        room: Callable[[], int],
        accept: Callable[[Delivery, float], Awaitable[RequestId | None]],
        clock: Callable[[], float],
    ) -> None:
        """`room`: requests that may be taken; 0 where we may take none. `accept` takes a message, and when its pull
        began; it returns None for what is of no use."""
        self._bus = bus
        self._others = others
        self._room = room
        self._accept = accept
        self._clock = clock

    async def run(self, is_over: Callable[[], bool]) -> None:
        pause_s = STEAL_S
        while not is_over():
            await asyncio.sleep(pause_s)
            # To list all queues costs the broker something: who finds nothing asks ever less often.
            pause_s = min(2 * pause_s, MAX_STEAL_S)
            try:
                while await self._steal():
                    pause_s = STEAL_S
            except BusError as error:
                log.info("nothing stolen", error=str(error))

    async def _steal(self) -> bool:
        """Whether there was anything."""
        if self._room() <= 0 or not (others := self._others()):
            return False
        depths = await self._bus.queue_depths(REQUESTS)
        for lane in Lane:
            queues = [queue for queue in others if queue.lane is lane]
            names = [queue.consumer.name for queue in queues]
            pending = [depths[name].num_pending if name in depths else 0 for name in names]
            found = to_steal(pending, self._room())
            if found is not None:
                number, count = found
                results = await asyncio.gather(
                    *(self._steal_one(queues[number]) for _ in range(count)), return_exceptions=True
                )
                for result in results:
                    if isinstance(result, BaseException):
                        raise result
                return any(results)
        return False

    async def _steal_one(self, queue: Queue) -> bool:
        pulled_at = self._clock()
        delivery = await self._bus.pull(queue.consumer, STOLEN_PULL_S)
        return delivery is not None and await self._accept(delivery, pulled_at) is not None
