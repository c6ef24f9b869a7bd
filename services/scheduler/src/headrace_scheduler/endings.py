"""Ends requests: publishes the terminal event on the token log, then acknowledges the queue message.

A request that was given up goes into the stream of the dead before that. The event is stored under the request's own
message id, so that repeating it within the stream's dedupe window stores it once. An acknowledgement that fails for
good is repeated when the queue offers the message again.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator

import structlog
from msgspec.structs import replace

from headrace_scheduler.decisions import EndedRequest
from headrace_shared import codec
from headrace_shared.bus import Bus
from headrace_shared.errors import BusError, PayloadTooLarge
from headrace_shared.messages import RequestId
from headrace_shared.record_messages import DeadRequest
from headrace_shared.subjects import dead_subject, tokens_subject

MAX_ATTEMPTS = 8
FIRST_DELAY_S = 0.1
MAX_DELAY_S = 5.0
MAX_CONCURRENT = 32
MAX_UNSETTLED = 4096

log = structlog.get_logger(__name__)


class Endings:
    """`run` is its task. `end` never waits; what is pending is bounded by the requests that this process owns."""

    def __init__(
        self,
        bus: Bus,
        *,
        keep_dead_prompts: bool = False,
        wall_clock: Callable[[], float] = time.time,
        on_settled: Callable[[EndedRequest, float, bool], None] = lambda *_: None,
    ) -> None:
        """`on_settled` is told how long it took, and whether it was done in the end."""
        self._bus = bus
        self._keep_dead_prompts = keep_dead_prompts
        self._wall_clock = wall_clock
        self._on_settled = on_settled
        self.num_dead = 0
        """Given up, since the start."""
        self._queue: asyncio.Queue[EndedRequest] = asyncio.Queue()
        self._pending: dict[int, EndedRequest] = {}
        self._unsettled: OrderedDict[RequestId, EndedRequest] = OrderedDict()
        """Given up after MAX_ATTEMPTS."""

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def ack_subjects(self) -> Iterator[str]:
        """Of the requests whose message is not acknowledged yet."""
        return (ended.ack_subject for ended in self._pending.values())

    def request_ids(self) -> Iterator[RequestId]:
        """Of the same."""
        return (ended.event.request_id for ended in self._pending.values())

    def end(self, ended: EndedRequest) -> None:
        self._pending[id(ended)] = ended
        self._queue.put_nowait(ended)

    def end_again(self, request_id: RequestId, ack_subject: str) -> bool:
        """The queue offers a request again that ended here. False if all that is left is to acknowledge it."""
        ended = self._unsettled.pop(request_id, None)
        if ended is not None:
            self.end(ended._replace(ack_subject=ack_subject))
        return ended is not None

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(MAX_CONCURRENT):
                group.create_task(self._work(), name=f"ending-{number}")

    async def settle(self, timeout_s: float) -> None:
        """Waits until nothing is pending, at most `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._queue.join()
        except TimeoutError:
            log.warning("requests not settled in time", num_pending=self.num_pending)

    async def _work(self) -> None:
        while True:
            ended = await self._queue.get()
            began_at = time.monotonic()
            try:
                is_settled = await self._finish(ended)
                self._on_settled(ended, time.monotonic() - began_at, is_settled)
            finally:
                del self._pending[id(ended)]
                self._queue.task_done()

    async def _finish(self, ended: EndedRequest) -> bool:
        """Whether it is over."""
        event = ended.event
        subject = tokens_subject(ended.router, event.request_id)
        is_told = False
        is_buried = ended.dead is None
        delay_s = FIRST_DELAY_S
        for _ in range(MAX_ATTEMPTS):
            try:
                if ended.dead is not None and not is_buried:
                    await self._bury(ended.dead)
                    is_buried = True
                    self.num_dead += 1
                if not is_told:
                    await self._bus.enqueue(subject, codec.encode(event), message_id=f"{event.request_id}-ended")
                    is_told = True
                await self.acknowledge(ended.ack_subject)
                return True
            except BusError as error:
                log.info("request not settled yet", request_id=event.request_id, error=str(error))
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, MAX_DELAY_S)
        log.warning("request not settled: the queue will offer it again", request_id=event.request_id)
        self._unsettled[event.request_id] = ended
        if len(self._unsettled) > MAX_UNSETTLED:
            self._unsettled.popitem(last=False)
        return False

    async def _bury(self, dead: DeadRequest) -> None:
        dead = replace(dead, died_at=self._wall_clock(), request=dead.request if self._keep_dead_prompts else None)
        subject = dead_subject(dead.model, dead.request_id)
        message_id = f"{dead.request_id}-dead"
        try:
            await self._bus.enqueue(subject, codec.encode(dead), message_id=message_id)
        except PayloadTooLarge:
            await self._bus.enqueue(subject, codec.encode(replace(dead, request=None)), message_id=message_id)

    async def acknowledge(self, ack_subject: str) -> None:
        """Raises BusError. An empty subject belongs to a request that never came from the queue."""
        if ack_subject:
            await self._bus.acknowledge(ack_subject)
