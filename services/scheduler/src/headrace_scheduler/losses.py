"""Stores how often requests have lost their worker, where a successor of ours finds it (`suspects.py`)."""

import asyncio
from collections.abc import Callable

import structlog

from headrace_shared import codec
from headrace_shared.bus import Bus
from headrace_shared.errors import BusError, ProtocolError
from headrace_shared.messages import RequestId
from headrace_shared.record_messages import LossRecord
from headrace_shared.subjects import LOSSES

MAX_CONCURRENT = 8
MAX_ATTEMPTS = 20
RETRY_S = 0.25

log = structlog.get_logger(__name__)


class Losses:
    """`run` is a task. `on_stored` is called for each request whose latest record is in the bucket."""

    def __init__(self, bus: Bus, on_stored: Callable[[RequestId], None]) -> None:
        self._bus = bus
        self._on_stored = on_stored
        self._latest: dict[RequestId, LossRecord] = {}
        """Not stored yet: bounded by the requests that this process holds."""
        self._queue: asyncio.Queue[RequestId] = asyncio.Queue()

    def store(self, request_id: RequestId, record: LossRecord) -> None:
        is_queued = request_id in self._latest
        self._latest[request_id] = record
        if not is_queued:
            self._queue.put_nowait(request_id)

    async def read(self, request_id: RequestId) -> LossRecord | None:
        """Raises BusError."""
        entry = await self._bus.get(LOSSES.name, request_id)
        if entry is None:
            return None
        try:
            return codec.decode(entry.value, LossRecord)
        except ProtocolError as error:
            log.warning("undecodable record of losses", request_id=request_id, error=str(error))
            return None

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(MAX_CONCURRENT):
                group.create_task(self._work(), name=f"losses-{number}")

    async def _work(self) -> None:
        while True:
            request_id = await self._queue.get()
            # A newer record may come while one is on its way.
            while await self._put(request_id) is not self._latest[request_id]:
                pass
            del self._latest[request_id]
            self._on_stored(request_id)

    async def _put(self, request_id: RequestId) -> LossRecord:
        """Which record is settled now."""
        record = self._latest[request_id]
        for _ in range(MAX_ATTEMPTS):
            record = self._latest[request_id]
            try:
                await self._bus.put(LOSSES.name, request_id, codec.encode(record))
                return record
            except BusError as error:
                log.info("loss not stored yet", request_id=request_id, error=str(error))
                await asyncio.sleep(RETRY_S)
        # A full bucket must not keep a request from its trial: this process still knows.
        log.warning("loss not stored", request_id=request_id)
        return record
