"""Workers as replicas of the worker services of a Swarm stack (`docker stack deploy`).

Swarm names its tasks and chooses which one to end, so a worker is named after its task, and a start is "one replica
more". Which start was the last is kept in a label of the service, changed together with the number of replicas by
compare-and-set: a start that is repeated counts once, and of two autoscalers one fails.
"""

import asyncio
from collections.abc import Callable, Sequence

import structlog

from headrace_autoscaler.docker_engine import DockerEngine, EngineRefused
from headrace_autoscaler.driver import DriverError, Fenced, Instance, InstanceState
from headrace_autoscaler.swarm_spec import Scaling, WorkerService, read_service, scaled, scaling_of
from headrace_autoscaler.swarm_tasks import TaskView, read_tasks
from headrace_shared.messages import WorkerId

MAX_ATTEMPTS = 4
"""Somebody else may have changed the service since it was read."""

log = structlog.get_logger(__name__)


class SwarmDriver:
    """A `Driver`. Replicas are all alike, so there is no warm pool."""

    def __init__(self, engine: DockerEngine, stack: str) -> None:
        self._engine = engine
        self._stack = stack
        self._changing = asyncio.Lock()
        """One change at a time: each looks first at what is there."""

    async def instances(self) -> Sequence[Instance]:
        return [task.instance for _, tasks in await self._read() for task in tasks]

    async def start(self, model: str, worker: WorkerId, generation: int, parked: bool = False) -> Instance:
        """The instance's worker is not known yet: it is `worker-<task>`, of whichever task comes next."""
        if parked:
            raise DriverError("replicas of a Swarm service are all alike: there is no warm pool")

        def more(now: Scaling) -> Scaling:
            if generation < now.generation:
                raise Fenced(f"generation {generation} is over, {now.generation} has begun")
            return now if now.worker == worker else Scaling(now.replicas + 1, generation, worker)

        async with self._changing:
            await self._scale(model, more)
        return Instance(f"start:{worker}", WorkerId(""), model, InstanceState.CREATED, 0.0, None, True)

    async def stop(self, instance: Instance, grace_s: float) -> None:
        """One replica less, unless the task is accounted for already. A worker that has left by itself, drained over
        the bus, is the one that goes; else Swarm chooses, and gives it the grace of the stack file."""
        async with self._changing:
            for service, tasks in await self._read():
                if any(task.instance.key == instance.key for task in tasks):
                    await self._scale(service.model, lambda now: now._replace(replicas=max(0, now.replicas - 1)))

    async def close(self) -> None:
        await self._engine.close()

    async def _read(self) -> list[tuple[WorkerService, list[TaskView]]]:
        services = await self._services()
        tasks = await self._engine.tasks() if services else []
        try:
            return [(service, read_tasks(service, tasks)) for service in services]
        except (KeyError, TypeError, AttributeError) as error:
            raise DriverError(f"the engine describes a task in an unknown way: {error!r}") from error

    async def _services(self) -> list[WorkerService]:
        try:
            read = [read_service(found, self._stack) for found in await self._engine.services()]
        except (KeyError, TypeError, AttributeError) as error:
            raise DriverError(f"the engine describes a service in an unknown way: {error!r}") from error
        return [service for service in read if service is not None]

    async def _scale(self, model: str, change: Callable[[Scaling], Scaling]) -> None:
        for attempt in range(1, MAX_ATTEMPTS + 1):
            service = next((found for found in await self._services() if found.model == model), None)
            if service is None:
                raise DriverError(f"no replicated worker service of the stack {self._stack} serves {model}")
            now = scaling_of(service.spec)
            wanted = change(now)
            if wanted == now:
                return
            try:
                await self._engine.update_service(service.id, service.version, scaled(service.spec, wanted))
            except EngineRefused as error:
                if error.status == 412:
                    raise Fenced(str(error)) from error
                if "out of sequence" not in str(error) or attempt == MAX_ATTEMPTS:
                    raise
                continue
            log.info("service scaled", service=service.id, before=now.replicas, replicas=wanted.replicas)
            return
