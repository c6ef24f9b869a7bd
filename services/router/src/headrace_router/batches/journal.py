"""Results of lines in the broker's stream, from when they come until the batch's files are written."""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Iterable
from functools import partial
from typing import NamedTuple

import structlog

from headrace_router.batches.results import LineResult, ResultGatherer, ResultPart, pack, unpack
from headrace_shared.bus import Bus
from headrace_shared.codec import decode, encode
from headrace_shared.errors import ProtocolError, QueueFull
from headrace_shared.patience import patiently
from headrace_shared.subjects import BATCH_RESULTS, batch_results_subject

log = structlog.get_logger(__name__)

READ_MESSAGES, FEWEST_MESSAGES, MOST_MESSAGES = 8, 2, 32
READ_BYTES = 512 * 1024
"""About so much is read at once: others share the connection."""
LARGE_BYTES = 256 * 1024
"""Packed and unpacked off the event loop."""
FULL_WAIT_S = 5.0
"""Between two attempts to store a result while there is no room. Others' results go when their files are written."""


class Done(NamedTuple):
    numbers: set[int]
    """Of lines."""
    num_good: int
    num_bytes: int
    """Packed."""

    @property
    def num_failed(self) -> int:
        return len(self.numbers) - self.num_good


class Journal:
    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def open(self) -> None:
        """Raises BusError."""
        await self._bus.ensure_stream(BATCH_RESULTS)

    async def add(self, batch_id: str, result: LineResult) -> int:
        """Returns when the broker has it: how many bytes that took. Waits for room as long as it takes. Raises
        ProtocolError for a result that is too large, BusError."""
        writer, num_bytes = secrets.token_hex(8), 0
        subject = batch_results_subject(batch_id)
        is_large = len(result.body) > LARGE_BYTES
        for part in await asyncio.to_thread(pack, result, writer) if is_large else pack(result, writer):
            message_id = f"{batch_id}-{part.number}-{writer}-{part.part}"
            num_bytes += len(part.data)
            while True:
                try:
                    await patiently(partial(self._bus.enqueue, subject, encode(part), message_id=message_id))
                    break
                except QueueFull:
                    log.warning("no room for results of batches", batch_id=batch_id)
                    await asyncio.sleep(FULL_WAIT_S)
        return num_bytes

    async def done(self, batch_id: str) -> Done:
        """Which lines have a result. Raises BusError."""
        gatherer, num_good, num_bytes = ResultGatherer(), 0, 0
        async for part in self._parts(batch_id):
            gathered = gatherer.feed(part)
            num_good += gathered is not None and gathered.is_good
            num_bytes += len(part.data)
        return Done(gatherer.done, num_good, num_bytes)

    async def results(self, batch_id: str) -> AsyncGenerator[LineResult, None]:
        """One of each line that has one, in the order in which they came. Raises BusError."""
        gatherer = ResultGatherer()
        async for part in self._parts(batch_id):
            gathered = gatherer.feed(part)
            if gathered is None:
                continue
            is_large = sum(map(len, gathered.parts)) > LARGE_BYTES // 4
            try:
                yield await asyncio.to_thread(unpack, gathered.parts) if is_large else unpack(gathered.parts)
            except ProtocolError as error:
                log.error("unreadable result of a line", batch_id=batch_id, line=gathered.number, error=str(error))

    async def purge(self, batch_id: str) -> None:
        """Raises BusError."""
        await self._bus.purge(BATCH_RESULTS.name, batch_results_subject(batch_id))

    async def tidy(self, batch_ids: Iterable[str]) -> None:
        """Of batches that are over: whoever ended one may have died before it could purge. Raises BusError."""
        if not await self._bus.num_messages(BATCH_RESULTS.name):
            return
        for batch_id in batch_ids:
            await self.purge(batch_id)

    async def _parts(self, batch_id: str) -> AsyncGenerator[ResultPart, None]:
        subject, sequence, limit = batch_results_subject(batch_id), 1, READ_MESSAGES
        while True:
            messages = await patiently(partial(self._bus.read, BATCH_RESULTS.name, subject, limit, sequence))
            for message in messages:
                try:
                    yield decode(message.data, ResultPart)
                except ProtocolError as error:
                    log.error("undecodable result of a line", batch_id=batch_id, error=str(error))
            if len(messages) < limit:
                return
            sequence = messages[-1].stream_sequence + 1
            size = sum(len(message.data) for message in messages)
            if size < READ_BYTES // 2:
                limit = min(MOST_MESSAGES, 2 * limit)
            elif size > READ_BYTES:
                limit = max(FEWEST_MESSAGES, limit // 2)
