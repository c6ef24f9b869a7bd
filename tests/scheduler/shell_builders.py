"""Builders for tests of the scheduler's shell on an in-process broker."""

import asyncio
import time
from collections.abc import Callable

from headrace_shared.bus import Bus
from headrace_shared.codec import pack_ids
from headrace_shared.errors import BusUnavailable
from headrace_shared.memory_bus import MemoryBus
from headrace_shared.messages import Lane, Request, RequestId, RouterId, SamplingParams, StopParams
from headrace_shared.subjects import CANCELS, DEAD, LEASES, LOSSES, TOKENS, queues_of, requests_stream

MODEL = "m"


def request(number: int = 1, *, num_choices: int = 1, num_prompt: int = 5, max_tokens: int = 8) -> Request:
    return Request(
        request_id=RequestId(f"{number:032x}"),
        router=RouterId("router-1"),
        model=MODEL,
        prompt=pack_ids(range(num_prompt)),
        sampling=SamplingParams(seed=0),
        stop=StopParams(max_tokens=max_tokens),
        num_choices=num_choices,
    )


async def prepare(bus: Bus) -> None:
    """Streams, consumers and buckets, as a scheduler makes them."""
    for spec in (requests_stream(1000, 1 << 30), TOKENS, CANCELS, DEAD):
        await bus.ensure_stream(spec)
    for lane in Lane:
        for queue in queues_of(MODEL, lane, 0):
            await bus.ensure_consumer(queue.consumer)
    for bucket in (LEASES, LOSSES):
        await bus.ensure_bucket(bucket)


async def until(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, condition
        await asyncio.sleep(0.005)


class FlakyBus(MemoryBus):
    """Fails the next calls of `enqueue` and `acknowledge` as a broken connection would."""

    num_failures = 0

    def _fail(self) -> None:
        if self.num_failures:
            self.num_failures -= 1
            raise BusUnavailable("scripted failure")

    async def enqueue(self, subject: str, data: bytes, *, message_id: str, headers: object = None) -> int:
        self._fail()
        return await super().enqueue(subject, data, message_id=message_id)

    async def acknowledge(self, ack_subject: str) -> None:
        self._fail()
        await super().acknowledge(ack_subject)
