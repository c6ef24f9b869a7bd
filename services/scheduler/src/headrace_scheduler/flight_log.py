"""Sends what the recorder has written to the broker, which keeps the latest of it."""

import asyncio
import time
from collections.abc import Callable

import structlog

from headrace_scheduler.recording import Recorder
from headrace_scheduler.scheduler import Scheduler
from headrace_shared import codec
from headrace_shared.bus import Bus
from headrace_shared.errors import BusError
from headrace_shared.messages import FlightPart, SchedulerId
from headrace_shared.subjects import FLIGHT, flight_subject

FLUSH_S = 1.0
"""How much of a recording a crash can cost, at most, unless a chunk is complete earlier."""
LOOK_S = 0.1
ENVELOPE_BYTES = 1024

log = structlog.get_logger(__name__)


class FlightLog:
    """`run` is its task. `clock` is that of the events."""

    def __init__(self, bus: Bus, scheduler_id: SchedulerId, clock: Callable[[], float]) -> None:
        self._bus = bus
        self._id = scheduler_id
        self._clock = clock
        self._recorder = Recorder(scheduler_id)
        self._num_chunks = 0

    def attach(self, core: Scheduler) -> None:
        """From now on this core is recorded, instead of any other."""
        self._recorder.attach(core, time.time(), self._clock())

    async def open(self) -> None:
        """Raises BusError."""
        await self._bus.ensure_stream(FLIGHT)

    async def run(self) -> None:
        flushed_at = self._clock()
        while True:
            await asyncio.sleep(LOOK_S)
            now = self._clock()
            if not self._bus.is_connected or (now - flushed_at < FLUSH_S and not self._recorder.is_due):
                continue  # what cannot be sent is kept, within a bound
            flushed_at = now
            data = self._recorder.take(time.time(), now)
            if data is not None:
                self._send(data)

    def close(self) -> None:
        """Sends the rest, if it can be sent."""
        data = self._recorder.take(time.time(), self._clock())
        if data is not None and self._bus.is_connected:
            self._send(data)

    def _send(self, data: bytes) -> None:
        size = self._bus.max_payload - ENVELOPE_BYTES
        pieces = [data[start : start + size] for start in range(0, len(data), size)]
        self._num_chunks += 1
        try:
            for number, piece in enumerate(pieces):
                part = FlightPart(
                    scheduler=self._id, chunk=self._num_chunks, part=number, num_parts=len(pieces), data=piece
                )
                self._bus.publish(flight_subject(self._id), codec.encode(part))
        except BusError as error:
            log.info("a piece of the flight recording is lost", error=str(error))
            self._recorder.lost(time.time(), self._clock())
