"""Does what was planned: commands go over the bus, starts and removals to the driver, each in a task of its own."""

import asyncio
import secrets
import time
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

from headrace_autoscaler.actions import Action, Command, Remove, Start
from headrace_autoscaler.driver import Driver, DriverError, Fenced, NoCapacity
from headrace_autoscaler.leadership import Leadership
from headrace_autoscaler.reconcile import Reconciler
from headrace_shared.bus import Bus
from headrace_shared.codec import encode
from headrace_shared.errors import BusError
from headrace_shared.fleet_messages import WorkerCommand
from headrace_shared.messages import WorkerId
from headrace_shared.service import Service
from headrace_shared.subjects import commands_subject
from headrace_shared.telemetry import Instrument

START_TIMEOUT_S = 120.0
STOP_MARGIN_S = 30.0
"""On top of the grace."""
MAX_TASKS = 32
"""Starts and removals under way; the next plan asks again for the others."""

ACTIONS = Instrument(
    "counter", "headrace_autoscaler_actions_total", "What the autoscaler did to workers.", ("model", "action")
)

log = structlog.get_logger(__name__)


def new_worker_id() -> WorkerId:
    return WorkerId(f"worker-{secrets.token_hex(4)}")


class Performing:
    def __init__(
        self, service: Service, bus: Bus, driver: Driver, leadership: Leadership, clock: Callable[[], float]
    ) -> None:
        self._service = service
        self._bus = bus
        self._driver = driver
        self._leadership = leadership
        self._clock = clock
        self._under_way: set[str] = set()
        """Workers and instances: of each, one thing at a time."""
        self._count = service.metrics.counter(ACTIONS)

    def perform(self, model: str, reconciler: Reconciler, actions: list[Action], epoch: int) -> None:
        """Only as long as we lead with that epoch."""
        for action in actions:
            if self._leadership.epoch != epoch:
                return
            if isinstance(action, Command):
                self._command(model, action, epoch)
            elif isinstance(action, Start):
                if not self._spawn(model, action.worker, "start", self._start(model, reconciler, action, epoch)):
                    reconciler.start_put_off(action.worker)
            else:
                self._spawn(model, _key(action), "remove", self._remove(model, action, epoch))

    def _command(self, model: str, command: Command, epoch: int) -> None:
        message = WorkerCommand(
            worker=command.worker,
            kind=command.kind,
            command_id=secrets.token_hex(8),
            sender=self._service.id,
            epoch=epoch,
            sent_at=time.time(),
        )
        try:
            self._bus.publish(commands_subject(command.worker), encode(message))
        except BusError as error:
            log.info("command not sent", worker=command.worker, error=str(error))  # the next plan repeats it
            return
        log.info("told a worker", model=model, worker=command.worker, command=command.kind.value)
        self._count.labels(model, command.kind.value).inc()

    def _spawn(self, model: str, key: str, name: str, work: Coroutine[Any, Any, None]) -> bool:
        """False if there was no room for it."""
        if key in self._under_way or len(self._under_way) >= MAX_TASKS:
            work.close()
            return key in self._under_way
        self._under_way.add(key)
        self._count.labels(model, name).inc()
        task = self._service.spawn(work, f"{name}-{key}")
        task.add_done_callback(lambda _: self._under_way.discard(key))
        return True

    async def _start(self, model: str, reconciler: Reconciler, start: Start, epoch: int) -> None:
        log.info("starting a worker", model=model, worker=start.worker, parked=start.is_parked)

        def failed(what: str, *, is_full: bool = False) -> None:
            log.warning("worker not started", model=model, worker=start.worker, reason=what)
            reconciler.start_failed(start.worker, what, self._clock(), is_full=is_full)

        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                instance = await self._driver.start(model, start.worker, epoch, parked=start.is_parked)
            reconciler.start_succeeded(start.worker, instance, self._clock())
        except TimeoutError:
            failed(f"no answer in {START_TIMEOUT_S:.0f} s")
        except (NoCapacity, Fenced) as error:
            failed(str(error), is_full=True)
        except DriverError as error:
            failed(str(error))

    async def _remove(self, model: str, action: Remove, epoch: int) -> None:
        instance = action.instance
        if self._leadership.epoch != epoch:
            return  # a process that was frozen meanwhile; engines fence starts, but not every engine fences this
        log.info("removing a worker", model=model, worker=instance.worker, key=instance.key, reason=action.reason)
        try:
            async with asyncio.timeout(action.grace_s + STOP_MARGIN_S):
                await self._driver.stop(instance, action.grace_s)
        except TimeoutError:
            log.warning("worker not removed", key=instance.key, reason="no answer in time")
        except DriverError as error:
            log.warning("worker not removed", key=instance.key, reason=str(error))


def _key(remove: Remove) -> str:
    """The worker's name where it has one, so that a start of it that is under way comes first."""
    return remove.instance.worker or remove.instance.key
