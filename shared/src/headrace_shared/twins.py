"""Two processes under one id, as when a setting is copied: each would take what is meant for the other.

Every process tells those of its id, with its telemetry, when it was started. Whoever was started later gives way. A
word or two of a predecessor may still be on their way, and one that drains will be gone.
"""

from collections.abc import Callable

import structlog

from headrace_shared.bus import Message
from headrace_shared.errors import ProtocolError
from headrace_shared.figures import read_figures
from headrace_shared.telemetry import STARTED_AT

NUM_WORDS = 3
"""Of a twin, until it is believed: it lives."""
MAX_TWINS = 16
"""Whose words are counted; of more, those who spoke last."""

ENDING = ("draining", "leaving")

log = structlog.get_logger(__name__)


class TwinWatch:
    def __init__(self, started_at: float, give_way: Callable[[], None]) -> None:
        """`started_at`: of this process, seconds since the epoch. `give_way` is called when another one goes on."""
        self._started_at = started_at
        self._give_way = give_way
        self._num_heard: dict[float, int] = {}
        """By when they were started, who spoke last at the end."""

    def on_telemetry(self, message: Message) -> None:
        """Under our own id."""
        try:
            telemetry = read_figures(message.data)
        except ProtocolError:
            return
        started_at = telemetry.gauges.get(STARTED_AT, 0.0)
        if not started_at or started_at == self._started_at or telemetry.state in ENDING:
            return
        num_heard = self._num_heard.pop(started_at, 0) + 1
        self._num_heard[started_at] = num_heard
        if len(self._num_heard) > MAX_TWINS:
            del self._num_heard[next(iter(self._num_heard))]
        if num_heard == NUM_WORDS:
            if started_at < self._started_at:
                self._give_way()
            else:
                log.warning("another process was started under our id, and is to give way", id=telemetry.id)
