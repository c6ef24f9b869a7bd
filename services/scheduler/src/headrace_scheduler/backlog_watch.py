"""What waits in the queue, told by one scheduler of each model: if all did, sums would count it many times."""

from collections.abc import Callable

import structlog

from headrace_shared.backlog import lane_depths
from headrace_shared.beats import beat
from headrace_shared.bus import Bus
from headrace_shared.errors import BusError
from headrace_shared.messages import Lane
from headrace_shared.telemetry import Instrument, Metrics

QUEUE_DEPTH = Instrument(
    "gauge",
    "headrace_queue_messages",
    "Requests in the queue that no scheduler has taken; told by one scheduler of the model, 0 by the others.",
    ("model", "lane"),
)
LOOK_S = 2.0

log = structlog.get_logger(__name__)


class BacklogWatch:
    """`run` is its task."""

    def __init__(self, bus: Bus, model: str, metrics: Metrics, is_teller: Callable[[], bool]) -> None:
        self._bus = bus
        self._model = model
        self._gauge = metrics.gauge(QUEUE_DEPTH)
        self._is_teller = is_teller
        self.num_messages = 0
        """In all lanes, as far as it is ours to tell."""

    async def run(self) -> None:
        while True:
            depths = dict.fromkeys(Lane, 0)
            try:
                if self._is_teller():
                    found = await lane_depths(self._bus, self._model)
                    depths = {lane: depth.num_pending for lane, depth in found.items()}
            except BusError as error:
                log.debug("queue depth unknown", error=str(error))
            else:
                for lane, depth in depths.items():
                    self._gauge.labels(self._model, lane.value).set(depth)
                self.num_messages = sum(depths.values())
            await beat(LOOK_S)
