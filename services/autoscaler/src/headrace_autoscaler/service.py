"""The shell: hears the fleet, reads the queue, decides once a period how many workers each model should have, and,
while it holds the lease, has its driver and the workers bring that about.

Without a driver, or while its engine does not answer, it only says what it would do. The one that leads publishes what
it knows of each model as gauges (`reporting.py`).
"""

import asyncio
import time
from collections.abc import Callable, Sequence

import structlog

from headrace_autoscaler.control import WAKE_PERIOD_S, Control, Plans
from headrace_autoscaler.driver import Driver, DriverError, Instance
from headrace_autoscaler.fleet import Fleet
from headrace_autoscaler.gathering import Gathering
from headrace_autoscaler.leadership import Leadership
from headrace_autoscaler.performing import Performing
from headrace_autoscaler.policy import Decision
from headrace_autoscaler.reporting import Reporting
from headrace_autoscaler.sharing import caps
from headrace_shared.bus import Bus, Message
from headrace_shared.codec import decode
from headrace_shared.errors import ProtocolError
from headrace_shared.figures import read_figures
from headrace_shared.fleet_messages import Hello
from headrace_shared.service import Service
from headrace_shared.subjects import ALL_HELLOS, ALL_TELEMETRY

INSTANCES_TIMEOUT_S = 20.0

log = structlog.get_logger(__name__)


class Autoscaler:
    def __init__(
        self,
        service: Service,
        bus: Bus,
        plans: Plans,
        driver: Driver | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._service = service
        self._bus = bus
        self._plans = plans
        self._driver = driver
        self._clock = clock
        self._fleet = Fleet()
        self._fleet.add_models(plans.models)
        self._gathering = Gathering(bus, self._fleet, clock)
        self._leadership = Leadership(bus, service.id)
        self._performing = Performing(service, bus, driver, self._leadership, clock) if driver is not None else None
        self._reporting = Reporting(service.metrics, plans.limits.most_workers)
        self._controls: dict[str, Control] = {}
        self._epoch: int | None = None
        """Of the lease under which `_controls` was filled."""
        self._heard_since = clock()
        self._driver_problem: str | None = None

    @property
    def decisions(self) -> dict[str, Decision]:
        """The latest, while we lead."""
        return {name: each.decision for name, each in self._controls.items() if each.decision is not None}

    @property
    def is_leader(self) -> bool:
        return self._epoch is not None and self._leadership.epoch == self._epoch

    async def run(self) -> None:
        """The body of the service."""
        service = self._service
        hellos = await self._bus.subscribe(ALL_HELLOS, self._on_hello)
        figures = await self._bus.subscribe(ALL_TELEMETRY, self._on_telemetry)
        self._bus.on_reconnect(self._hear_anew)
        self._hear_anew()
        lead = service.spawn(self._leadership.run(), "lead")
        service.spawn(service.report(self._bus, self._state, self._gauges), "telemetry")
        decide = service.spawn(self._decide_for_ever(), "decide")
        service.set_ready(lambda: None if self._bus.is_connected else "no connection to the broker")
        log.info("ready")
        await service.draining.wait()
        for task in (decide, lead):
            task.cancel()
        await self._leadership.resign()
        await hellos.close()
        await figures.close()

    async def evaluate(self) -> None:
        """One look at everything, and what follows from it."""
        if not self._bus.is_connected:
            self._hear_anew()
        epoch = self._leadership.epoch
        if epoch is None or epoch != self._epoch:
            # Another one may have acted meanwhile: what was planned is worth nothing any more.
            self._controls.clear()
            self._epoch = epoch
        if epoch is None or self._clock() - self._heard_since < self._plans.settle_s:
            return
        shown_at = self._clock()
        instances = await self._instances()
        self._fleet.add_models(each.model for each in instances or () if each.model)
        for model in self._fleet.models:
            control = self._controls.get(model)
            if control is None:
                control = Control(model, self._plans, self._fleet, self._gathering, self._clock)
                self._controls[model] = control
            await control.decide(instances or (), shown_at)
        if instances is not None:
            self._act(instances, shown_at, epoch)
        highest = self._fleet.highest_command_epoch(self._clock())
        if self._performing is not None and highest > epoch:
            await self._leadership.climb(highest + 1)

    def _act(self, instances: Sequence[Instance], shown_at: float, epoch: int) -> None:
        limited = caps({model: control.share for model, control in self._controls.items()})
        for model, control in self._controls.items():
            if self._performing is None or not self.is_leader:
                return
            heard_for_s = self._clock() - self._heard_since
            actions = control.plan(instances, shown_at, heard_for_s, limited.get(model))
            self._performing.perform(model, control.reconciler, actions, epoch)

    async def _decide_for_ever(self) -> None:
        while True:
            await self.evaluate()
            is_asleep = self._epoch is None or any(not each.counts.ready for each in self._controls.values())
            await asyncio.sleep(min(self._plans.period_s, WAKE_PERIOD_S) if is_asleep else self._plans.period_s)

    async def _instances(self) -> Sequence[Instance] | None:
        """None if there is no driver, or its engine does not tell. Complains once of each problem."""
        if self._driver is None:
            return None
        problem, instances = None, None
        try:
            async with asyncio.timeout(INSTANCES_TIMEOUT_S):
                instances = await self._driver.instances()
        except TimeoutError:
            problem = "no answer in time"
        except DriverError as error:
            problem = str(error)
        if problem != self._driver_problem:
            self._driver_problem = problem
            log.warning("workers cannot be started or stopped" if problem else "workers can be managed", reason=problem)
        return instances

    def _state(self) -> str:
        if self._service.draining.is_set():
            return "draining"
        return "ready"

    def _gauges(self) -> dict[str, float]:
        if not self.is_leader:
            return self._reporting.follower()
        can_act = self._driver is not None and self._driver_problem is None
        return self._reporting.gauges(self._controls.values(), self._clock(), can_act=can_act)

    def _hear_anew(self) -> None:
        """What was said meanwhile was missed."""
        self._heard_since = self._clock()

    def _on_hello(self, message: Message) -> None:
        try:
            self._fleet.on_hello(decode(message.data, Hello), self._clock())
        except ProtocolError as error:
            log.warning("bad hello", subject=message.subject, error=str(error))

    def _on_telemetry(self, message: Message) -> None:
        try:
            self._fleet.on_telemetry(read_figures(message.data), self._clock())
        except ProtocolError as error:
            log.warning("bad telemetry", subject=message.subject, error=str(error))
