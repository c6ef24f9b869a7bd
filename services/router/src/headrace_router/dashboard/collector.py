"""Hears the fleet, makes a frame a second, and wakes those who watch."""

import asyncio
import time
from collections.abc import Callable, Sequence

import structlog

from headrace_router.dashboard.board import Board
from headrace_router.dashboard.frame import MAX_PEERS, Depth, make_frame
from headrace_router.dashboard.history import History
from headrace_shared.backlog import model_depths
from headrace_shared.beats import beat
from headrace_shared.bus import Bus, Message
from headrace_shared.codec import decode
from headrace_shared.errors import BusError, ProtocolError
from headrace_shared.figures import read_figures
from headrace_shared.fleet_messages import Hello
from headrace_shared.subjects import ALL_HELLOS, ALL_TELEMETRY

PERIOD_S = 1.0
DEPTH_TIMEOUT_S = 0.8
UNKNOWN = Depth(None, None)

log = structlog.get_logger(__name__)


class Collector:
    """`run` is its task. `models`: whose queues are looked at."""

    def __init__(self, bus: Bus, models: Callable[[], Sequence[str]]) -> None:
        self._bus = bus
        self._models = models
        self._board = Board()
        self._seq = 0
        self._next = asyncio.Event()
        self.history = History()

    async def run(self) -> None:
        hellos = await self._bus.subscribe(ALL_HELLOS, self._on_hello)
        try:
            figures = await self._bus.subscribe(ALL_TELEMETRY, self._on_telemetry)
            try:
                while True:
                    await beat(PERIOD_S)
                    await self._observe()
            finally:
                await figures.close()
        finally:
            await hellos.close()

    def schedulers_of(self, model: str) -> list[str]:
        return [spoken.figures.id for spoken in self._board.of("scheduler") if spoken.figures.model == model]

    async def next_frame(self, after: int) -> bytes:
        """The newest frame, once there is one numbered higher than `after`. A slow reader leaves some out."""
        while self.history.latest_seq <= after:
            await self._next.wait()
        latest = self.history.latest
        assert latest is not None, after
        return latest

    async def _observe(self) -> None:
        depths = await self._depths()
        self._board.expire(time.monotonic())
        self._seq += 1
        self.history.add(make_frame(self._board, depths, self._seq, round(time.time(), 3)))
        self._next.set()
        self._next = asyncio.Event()

    async def _depths(self) -> dict[str, Depth]:
        models = list(self._models())[:MAX_PEERS]
        if not self._bus.is_connected:
            return dict.fromkeys(models, UNKNOWN)
        try:
            async with asyncio.timeout(DEPTH_TIMEOUT_S):
                depths = await model_depths(self._bus, models)
        except (BusError, TimeoutError) as error:
            log.debug("queue depths unknown", error=str(error))
            return dict.fromkeys(models, UNKNOWN)
        return {model: Depth(depth.num_pending, depth.num_unacknowledged) for model, depth in depths.items()}

    def _on_hello(self, message: Message) -> None:
        try:
            self._board.on_hello(decode(message.data, Hello), time.monotonic())
        except ProtocolError as error:
            log.debug("undecodable hello", error=str(error))

    def _on_telemetry(self, message: Message) -> None:
        try:
            self._board.on_telemetry(read_figures(message.data), time.monotonic())
        except ProtocolError as error:
            log.debug("undecodable telemetry", error=str(error))
