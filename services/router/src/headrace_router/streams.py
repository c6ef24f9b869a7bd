"""Makes the streams that the router uses, and makes them again when the broker has lost them.

The token log and the tombstones live in memory: a broker that is restarted does not know them any more.
"""

import asyncio
from collections.abc import Sequence

import structlog

from headrace_shared.bus import Bus
from headrace_shared.errors import BusError
from headrace_shared.subjects import StreamSpec

log = structlog.get_logger(__name__)

START_TIMEOUT_S = 30.0
_RETRY_S = 0.25


class StreamKeeper:
    def __init__(self, bus: Bus, streams: Sequence[StreamSpec]) -> None:
        self._bus = bus
        self._streams = streams
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
            await self._reconnected.wait()
            self._reconnected.clear()
            try:
                await self._ensure()
            except BusError as error:
                log.warning("streams are not ready", error=str(error))
                await asyncio.sleep(_RETRY_S)
                self._reconnected.set()

    async def _ensure(self) -> None:
        for stream in self._streams:
            await self._bus.ensure_stream(stream)
