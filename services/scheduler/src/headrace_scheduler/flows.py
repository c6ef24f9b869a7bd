"""Finds out which tenants have queues of their own, and makes their consumers before anything is taken from them.

Consumers stay when the last key of a tenant is revoked: what was accepted is served. There are no more than flows.
"""

import asyncio
from collections.abc import Callable

import structlog

from headrace_shared.api_keys import MAX_FLOWS, ApiKey
from headrace_shared.bus import Bus, Entry
from headrace_shared.codec import decode
from headrace_shared.errors import BusError, ProtocolError
from headrace_shared.messages import Lane
from headrace_shared.subjects import KEYS, REQUESTS, former_consumer, queue_of, queues_of

RETRY_S = 0.5

log = structlog.get_logger(__name__)


class Flows:
    def __init__(self, bus: Bus, model: str, serve: Callable[[int], None]) -> None:
        """`serve` is told of each flow once, when its consumers are there."""
        self._bus = bus
        self._model = model
        self._serve = serve
        self._known: set[int] = set()
        self._found: set[int] = {0}
        self._has_found = asyncio.Event()

    async def open(self) -> None:
        """Raises BusError."""
        for lane in Lane:
            await self._bus.remove_consumer(REQUESTS, former_consumer(self._model, lane))
        for name in await self._bus.queue_depths(REQUESTS):
            for lane in Lane:
                queue = queue_of(self._model, lane, name)
                if queue is not None:
                    self._found.add(queue.flow)
        await self._bus.ensure_bucket(KEYS)
        await self._bus.watch(KEYS.name, self.on_key)
        await self._make()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._has_found.wait()
            self._has_found.clear()
            try:
                await self._make()
            except BusError as error:
                log.warning("a tenant's queues are not ready", error=str(error))
                await asyncio.sleep(RETRY_S)
                self._has_found.set()

    def on_key(self, entry: Entry | None, _: str) -> None:
        """Of the bucket KEYS."""
        if entry is None:
            return
        try:
            flow = decode(entry.value, ApiKey).flow
        except ProtocolError as error:
            log.warning("undecodable API key", key_id=entry.key, error=str(error))
            return
        if flow not in self._found and 0 < flow <= MAX_FLOWS:
            self._found.add(flow)
            self._has_found.set()

    async def _make(self) -> None:
        for flow in sorted(self._found - self._known):
            for lane in Lane:
                for queue in queues_of(self._model, lane, flow):
                    await self._bus.ensure_consumer(queue.consumer)
            self._known.add(flow)
            self._serve(flow)
