"""Cancellations: heard live, and looked up as tombstones where they may have been missed.

A Cancel may come before its request does, so those heard lately are kept. One that came while nobody listened left a
tombstone in the stream CANCELS, which is read for requests that waited in the queue before we listened, were delivered
before, or are held when the connection comes back.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable

import structlog

from headrace_shared import codec
from headrace_shared.bus import Bus, Delivery, Message
from headrace_shared.errors import BusError, ProtocolError
from headrace_shared.messages import Cancel, RequestId
from headrace_shared.subjects import ALL_CANCELS, CANCELS, MAX_TOMBSTONES, cancel_subject

MAX_REMEMBERED = 10_000
CLOCK_SLACK_S = 5.0
"""Most that we may be wrong about the broker's clock. Beyond it a tombstone could be missed, nothing worse."""
MAX_CONCURRENT = 8
RETRY_S = 0.5
MAX_ATTEMPTS = 60
"""A cluster elects a leader in 4 to 9 s, and refuses at once meanwhile."""

log = structlog.get_logger(__name__)


class Cancellations:
    """`apply` hands a Cancel to the core, which ignores what it does not know. `run` is a task."""

    def __init__(self, bus: Bus, apply: Callable[[Cancel], None], broker_now: Callable[[], float] = time.time) -> None:
        """`broker_now`: the time by the broker's clock, as well as we know it."""
        self._bus = bus
        self._apply = apply
        self._broker_now = broker_now
        self._listening_since = float("inf")
        self._heard: OrderedDict[RequestId, list[Cancel]] = OrderedDict()
        self._wanted: asyncio.Queue[RequestId] = asyncio.Queue()
        """Each request is in it once, so that it is bounded by those that this process holds, however often the
        connection comes back."""
        self._queued: set[RequestId] = set()

    async def open(self) -> None:
        """Raises BusUnavailable."""
        await self._bus.subscribe(ALL_CANCELS, self._on_message)
        self._listening_since = self._broker_now()

    async def before_adding(self, request_id: RequestId, delivery: Delivery) -> Cancel | None:
        """A request is about to be given to the core: what tells to end it at once. Raises BusError."""
        if delivery.num_delivered > 1 or delivery.published_at < self._listening_since + CLOCK_SLACK_S:
            await self._read(request_id)
        return next((cancel for cancel in self._heard.get(request_id, ()) if cancel.choice is None), None)

    def on_added(self, request_id: RequestId) -> None:
        """The core has it now: what was cancelled of it before?"""
        for cancel in self._heard.get(request_id, ()):
            self._apply(cancel)

    def on_reconnect(self, held: Iterable[RequestId]) -> None:
        self._listening_since = self._broker_now()
        self.look_up(held)

    def look_up(self, request_ids: Iterable[RequestId]) -> None:
        for request_id in request_ids:
            if request_id not in self._queued:
                self._queued.add(request_id)
                self._wanted.put_nowait(request_id)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(MAX_CONCURRENT):
                group.create_task(self._work(), name=f"tombstones-{number}")

    async def _work(self) -> None:
        while True:
            request_id = await self._wanted.get()
            self._queued.discard(request_id)
            for _ in range(MAX_ATTEMPTS):
                try:
                    await self._read(request_id)
                    break
                except BusError as error:
                    log.info("tombstone not readable yet", request_id=request_id, error=str(error))
                    await asyncio.sleep(RETRY_S)
            else:
                log.warning("tombstone not read: a cancelled request may run to its end", request_id=request_id)

    async def _read(self, request_id: RequestId) -> None:
        for message in await self._bus.read(CANCELS.name, cancel_subject(request_id), MAX_TOMBSTONES):
            self._on_message(message)

    def _on_message(self, message: Message) -> None:
        try:
            cancel = codec.decode(message.data, Cancel)
        except ProtocolError as error:
            log.warning("undecodable cancellation dropped", error=str(error))
            return
        heard = self._heard.setdefault(cancel.request_id, [])
        if cancel not in heard:
            heard.append(cancel)
            del heard[:-MAX_TOMBSTONES]
        self._heard.move_to_end(cancel.request_id)
        while len(self._heard) > MAX_REMEMBERED:
            self._heard.popitem(last=False)
        self._apply(cancel)
