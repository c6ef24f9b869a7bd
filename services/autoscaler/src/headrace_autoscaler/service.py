"""The shell: hears the workers, reads the queue, and says once a period how many workers each model should have.

It changes nothing itself: it logs its decisions and publishes them as gauges `desired_workers:<model>`.
"""

import asyncio
import time
from collections.abc import Callable

import structlog

from headrace_autoscaler.fleet import Fleet
from headrace_autoscaler.observation import Observation
from headrace_autoscaler.policy import Decision, Limits, State, decide
from headrace_shared.backlog import lane_depth
from headrace_shared.bus import Bus, Message
from headrace_shared.codec import decode
from headrace_shared.errors import BusError, ProtocolError
from headrace_shared.messages import Hello, Lane, Telemetry
from headrace_shared.service import Service
from headrace_shared.subjects import ALL_HELLOS, ALL_TELEMETRY

log = structlog.get_logger(__name__)


class Autoscaler:
    def __init__(self, bus: Bus, limits: Limits, period_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._bus = bus
        self._limits = limits
        self._period_s = period_s
        self._clock = clock
        self._fleet = Fleet()
        self._states: dict[str, State] = {}
        self.decisions: dict[str, Decision] = {}

    async def run(self, service: Service) -> None:
        """The body of the service."""
        hellos = await self._bus.subscribe(ALL_HELLOS, self._on_hello)
        figures = await self._bus.subscribe(ALL_TELEMETRY, self._on_telemetry)
        service.spawn(service.report(self._bus, lambda: self._state(service), self._gauges), "telemetry")
        service.spawn(self._decide_for_ever(), "decide")
        service.set_ready(lambda: None if self._bus.is_connected else "no connection to the broker")
        log.info("ready")
        await service.draining.wait()
        await hellos.close()
        await figures.close()

    async def decide_once(self) -> None:
        if not self._bus.is_connected:
            return  # a queue that cannot be read is not an empty one
        for model in self._fleet.models:
            fleet = self._fleet.of(model, self._clock())
            num_waiting = num_taken = 0
            for lane in Lane:
                try:
                    depth = await lane_depth(self._bus, model, lane)
                except BusError as error:
                    log.debug("queue depth unknown", model=model, lane=lane, error=str(error))
                    continue
                num_waiting += depth.num_pending
                num_taken += depth.num_unacknowledged
            observation = Observation(
                num_ready=fleet.num_workers,
                num_waiting=num_waiting,
                num_running=max(num_taken, fleet.num_sequences),
                worker_capacity=fleet.worker_capacity,
            )
            state = self._states.get(model, State())
            decision, self._states[model] = decide(observation, self._limits, state, self._clock())
            before = self.decisions.get(model)
            self.decisions[model] = decision
            if before is None or before.desired != decision.desired:
                changes = {"model": model, "workers": fleet.num_workers, "desired": decision.desired}
                log.info("decision", **changes, reason=decision.reason)

    async def _decide_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self._period_s)
            await self.decide_once()

    def _state(self, service: Service) -> str:
        return "draining" if service.draining.is_set() else "ready"

    def _gauges(self) -> dict[str, float]:
        return {f"desired_workers:{model}": float(decision.desired) for model, decision in self.decisions.items()}

    def _on_hello(self, message: Message) -> None:
        try:
            self._fleet.on_hello(decode(message.data, Hello), self._clock())
        except ProtocolError as error:
            log.warning("bad hello", subject=message.subject, error=str(error))

    def _on_telemetry(self, message: Message) -> None:
        try:
            self._fleet.on_telemetry(decode(message.data, Telemetry))
        except ProtocolError as error:
            log.warning("bad telemetry", subject=message.subject, error=str(error))
