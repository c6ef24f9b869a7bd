"""Reads the queue, and puts it together with what the fleet says."""

from collections.abc import Callable

import structlog

from headrace_autoscaler.fleet import Fleet
from headrace_autoscaler.observation import Observation
from headrace_autoscaler.rates import Arrivals
from headrace_autoscaler.reconcile import Counts
from headrace_shared.backlog import model_depths
from headrace_shared.bus import Bus, QueueDepth
from headrace_shared.errors import BusError, BusRefused

log = structlog.get_logger(__name__)


class Gathering:
    def __init__(self, bus: Bus, fleet: Fleet, clock: Callable[[], float]) -> None:
        self._bus = bus
        self._fleet = fleet
        self._clock = clock
        self._readable: set[str] = set()
        """Models whose queue has been read."""
        self._waiting_since: dict[str, float] = {}
        self._arrivals: dict[str, Arrivals] = {}

    async def observe(self, model: str, counts: Counts, warm_up_s: float) -> Observation:
        depth = await self._depth(model)
        now = self._clock()
        fleet = self._fleet.of(model, now)
        seen = Observation(
            num_ready=counts.ready,
            num_waiting=None,
            num_running=None,
            num_starting=counts.coming,
            num_parked=counts.parked,
            worker_capacity=fleet.worker_capacity,
            worker_tokens_per_s=fleet.worker_tokens_per_s,
            warm_up_s=warm_up_s,
        )
        if depth is None:
            return seen
        num_waiting = depth.num_pending + fleet.num_in_windows + fleet.num_wanted
        if not num_waiting:
            self._waiting_since.pop(model, None)
        arrivals = self._arrivals.get(model, Arrivals()).after(depth.num_delivered + depth.num_pending)
        self._arrivals[model] = arrivals
        since = self._waiting_since.setdefault(model, now) if num_waiting else now
        return seen._replace(
            num_waiting=num_waiting,
            num_running=max(depth.num_unacknowledged - fleet.num_in_windows, fleet.num_sequences, 0),
            num_arrived=arrivals.num,
            # Nobody dates what is in the queue; where no worker takes anything, all of it has waited.
            oldest_wait_s=max(fleet.oldest_wait_s, 0.0 if counts.ready else now - since),
            num_waiting_tokens=fleet.num_waiting_tokens,
            kv_use=fleet.kv_use,
            batch_occupancy=fleet.batch_occupancy,
            gpu_utilization=fleet.gpu_utilization,
            ttft_s=fleet.ttft_s,
            load=fleet.load,
        )

    async def _depth(self, model: str) -> QueueDepth | None:
        """None if it cannot be read. A queue that nobody has made yet is empty."""
        try:
            depths = await model_depths(self._bus, [model])
        except BusError as error:
            if isinstance(error, BusRefused) and model not in self._readable:
                return QueueDepth(0, 0, 0)
            log.info("the queue cannot be read", model=model, error=str(error))
            return None
        self._readable.add(model)
        return depths[model]
