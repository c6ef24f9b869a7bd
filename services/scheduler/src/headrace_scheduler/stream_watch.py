"""Notices streams and buckets that somebody has deleted under everybody's feet: only a scheduler makes them again."""

from collections.abc import Callable

import structlog

from headrace_shared.beats import beat
from headrace_shared.bus import Bus
from headrace_shared.errors import BusError
from headrace_shared.provisioning import missing

CHECK_S = 5.0

log = structlog.get_logger(__name__)


class StreamWatch:
    def __init__(self, bus: Bus, is_due: Callable[[], bool], on_loss: Callable[[], None]) -> None:
        """`is_due`: it is this scheduler's turn to look, of several."""
        self._bus = bus
        self._is_due = is_due
        self._on_loss = on_loss

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await beat(CHECK_S)
            if not self._bus.is_connected or not self._is_due():
                continue
            try:
                lost = await missing(self._bus)
            except BusError as error:
                log.debug("streams not seen", error=str(error))
                continue
            if lost:
                log.error("streams are gone, with all they held: making them again", streams=lost)
                self._on_loss()
