"""Sends what the recorder has written to the broker, which keeps the latest of it."""

import time
from collections import deque
from collections.abc import Callable

import structlog

from headrace_scheduler.recording import Recorder
from headrace_scheduler.scheduler import Scheduler
from headrace_shared import codec
from headrace_shared.beats import beat
from headrace_shared.bus import Bus
from headrace_shared.errors import BusError
from headrace_shared.messages import SchedulerId
from headrace_shared.record_messages import FlightPart
from headrace_shared.subjects import FLIGHT, flight_subject

FLUSH_S = 1.0
"""How much of a recording a crash can cost, at most, unless a chunk is complete earlier."""
LOOK_S = 0.1
PARTS_PER_LOOK = 2
"""Grants go over the same connection, and must not wait behind a large state."""
ENVELOPE_BYTES = 1024

log = structlog.get_logger(__name__)


class FlightLog:
    """`run` is its task. Nothing is recorded before `open`. `clock` is that of the events."""

    def __init__(self, bus: Bus, scheduler_id: SchedulerId, clock: Callable[[], float]) -> None:
        self._bus = bus
        self._id = scheduler_id
        self._clock = clock
        self._recorder = Recorder(scheduler_id)
        self._core: Scheduler | None = None
        self._is_open = False
        self._num_chunks = 0
        self._unsent: deque[FlightPart] = deque()
        """Parts of one chunk; the next is taken when they are gone."""

    def attach(self, core: Scheduler) -> None:
        """From now on this core is recorded, instead of any other."""
        self._core = core
        if self._is_open:
            self._begin(core)

    async def open(self) -> None:
        """Also after a reconnect: the broker may have lost what it held. A broker that has no room for a recording is
        no reason not to serve."""
        try:
            await self._bus.ensure_stream(FLIGHT)
        except BusError as error:
            log.warning("no flight recording", error=str(error))
            self._is_open = False
            self._recorder.detach()
            return
        self._is_open = True
        if self._core is not None:
            self._begin(self._core)

    async def run(self) -> None:
        flushed_at = self._clock()
        while True:
            await beat(LOOK_S)
            if not self._bus.is_connected:
                continue  # what cannot be sent is kept, within a bound
            now = self._clock()
            if not self._unsent and (now - flushed_at >= FLUSH_S or self._recorder.is_due):
                flushed_at = now
                self._take()
            self._send(PARTS_PER_LOOK)

    def close(self) -> None:
        """Sends the rest, if it can be sent."""
        if self._bus.is_connected:
            self._send(len(self._unsent))
            self._take()
            self._send(len(self._unsent))

    def _begin(self, core: Scheduler) -> None:
        self._unsent.clear()
        self._recorder.attach(core, time.time(), self._clock())
        if not self._recorder.is_recording:
            log.warning("no flight recording: the state is too large")

    def _take(self) -> None:
        data = self._recorder.take(time.time(), self._clock())
        if data is None:
            return
        size = self._bus.max_payload - ENVELOPE_BYTES
        pieces = [data[start : start + size] for start in range(0, len(data), size)]
        self._num_chunks += 1
        for number, piece in enumerate(pieces):
            self._unsent.append(
                FlightPart(scheduler=self._id, chunk=self._num_chunks, part=number, num_parts=len(pieces), data=piece)
            )

    def _send(self, most: int) -> None:
        for _ in range(min(most, len(self._unsent))):
            try:
                self._bus.publish(flight_subject(self._id), codec.encode(self._unsent[0]))
            except BusError as error:
                log.info("a piece of the flight recording waits", error=str(error))
                return
            self._unsent.popleft()
