"""Makes the streams that the router uses, and makes them again when the broker has lost them.

The token log and the tombstones live in memory: a broker that is restarted does not know them any more. A queue that
was lost, with the broker's disk or by somebody's hand, is another one when it is there again.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence

import structlog

from headrace_shared.beats import until_beat
from headrace_shared.bus import Bus
from headrace_shared.errors import BusError
from headrace_shared.subjects import REQUESTS, StreamSpec

log = structlog.get_logger(__name__)

START_TIMEOUT_S = 30.0
_RETRY_S = 0.25
CHECK_S = 2.0


class StreamKeeper:
    def __init__(self, bus: Bus, streams: Sequence[StreamSpec], on_queue_lost: Callable[[], None]) -> None:
        self._bus = bus
        self._streams = streams
        self._on_queue_lost = on_queue_lost
        self._queue_made_at: float | None = None
        self._reconnected = asyncio.Event()

    async def start(self) -> None:
        """Raises BusError if it cannot be done within START_TIMEOUT_S; a broker may still be starting too."""
        self._bus.on_reconnect(self._reconnected.set)
        until = asyncio.get_running_loop().time() + START_TIMEOUT_S
        while True:
            try:
                await self._ensure()
                return
            except BusError as error:
                if asyncio.get_running_loop().time() > until:
                    raise
                log.warning("streams are not ready", error=str(error))
                await asyncio.sleep(_RETRY_S)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(until_beat(CHECK_S, time.monotonic())):
                    await self._reconnected.wait()
            await self._look_at_queue()
            if not self._reconnected.is_set():
                continue
            self._reconnected.clear()
            try:
                await self._ensure()
            except BusError as error:
                log.warning("streams are not ready", error=str(error))
                await asyncio.sleep(_RETRY_S)
                self._reconnected.set()

    async def _look_at_queue(self) -> None:
        try:
            made_at = await self._bus.made_at(REQUESTS)
        except BusError as error:  # away, or not made again yet
            log.debug("no queue to be seen", error=str(error))
            return
        before, self._queue_made_at = self._queue_made_at, made_at
        if before is not None and made_at != before:
            log.error("the broker has lost the queue: what waits in it is lost")
            self._on_queue_lost()

    async def _ensure(self) -> None:
        for stream in self._streams:
            await self._bus.ensure_stream(stream)
