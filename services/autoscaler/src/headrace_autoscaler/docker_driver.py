"""Workers as containers of the compose project that the autoscaler belongs to.

A new worker is a clone of the project's own worker service, with compose's labels, so that `docker compose ps`, `logs`
and `down` treat it as one of theirs. Nothing is remembered here: labels say what is whose, and a name, which the engine
gives only once, that no start happens twice.
"""

import asyncio
import math
from collections.abc import Callable, Sequence

import structlog

from headrace_autoscaler.container_spec import Clone, Unclonable, clone_body
from headrace_autoscaler.containers import (
    WorkerContainer,
    container_name,
    free_number,
    read_container,
    taken_gpus,
    template_of,
)
from headrace_autoscaler.docker_engine import DockerEngine, EngineRefused
from headrace_autoscaler.driver import DriverError, Fenced, Instance, InstanceState, NoCapacity
from headrace_autoscaler.gpu_inventory import Gpu, NotEnoughGpus, assign
from headrace_shared.messages import WorkerId

_STATES = {
    "created": InstanceState.CREATED,
    "running": InstanceState.RUNNING,
    "paused": InstanceState.RUNNING,
    "restarting": InstanceState.RUNNING,
    "removing": InstanceState.STOPPING,
    "exited": InstanceState.EXITED,
    "dead": InstanceState.EXITED,
}

log = structlog.get_logger(__name__)


class DockerDriver:
    """A `Driver`. `gpus` is asked at each start, for GPUs may fall out."""

    def __init__(self, engine: DockerEngine, project: str, gpus: Callable[[], Sequence[Gpu]]) -> None:
        self._engine = engine
        self._project = project
        self._gpus = gpus
        self._starting = asyncio.Lock()
        """One start at a time: each looks for numbers and GPUs that nobody has."""
        self._stopping: set[str] = set()

    async def instances(self) -> Sequence[Instance]:
        return [self._instance(container) for container in await self._containers()]

    async def start(self, model: str, worker: WorkerId, generation: int, parked: bool = False) -> Instance:
        async with self._starting:
            container = await self._find(worker)
            if container is None:
                container = await self._create(model, worker, generation, parked)
            if container.status in ("exited", "dead"):
                raise DriverError(f"{container.name} has ended already, with exit code {container.exit_code}")
            if container.status == "created":
                await self._engine.start(container.id)
            return self._instance(await self._inspect(container.id) or container)

    async def stop(self, instance: Instance, grace_s: float) -> None:
        container = await self._inspect(instance.key)
        if container is None:
            return
        if not container.is_managed:
            raise DriverError(f"{container.name} belongs to the operator, who stops it with docker compose")
        self._stopping.add(container.id)
        try:
            if container.status in ("running", "paused", "restarting"):
                await self._engine.stop(container.id, math.ceil(grace_s))
            await self._engine.remove(container.id)
        finally:
            self._stopping.discard(container.id)
        log.info("container removed", container=container.name, was=container.status)

    async def close(self) -> None:
        await self._engine.close()

    async def _create(self, model: str, worker: WorkerId, generation: int, parked: bool) -> WorkerContainer:
        containers = await self._containers()
        template = template_of(containers, model)
        if template is None:
            raise DriverError(
                f"no worker container of the project {self._project} serves {model}: one must be there to be cloned, "
                "running or stopped"
            )
        gpus = self._assign(template, containers)
        clone = Clone(worker, model, generation, free_number(containers), gpus, parked)
        name = container_name(self._project, worker)
        try:
            made = await self._engine.create(name, clone_body(template, clone))
        except Unclonable as error:
            raise DriverError(str(error)) from error
        except EngineRefused as error:
            if error.status == 412:
                raise Fenced(str(error)) from error
            # Of two starts of one worker the engine lets one win: the container is the same for both.
            made_before = await self._find(worker) if error.status == 409 else None
            if made_before is None:
                raise
            return made_before
        log.info("container created", container=name, model=model, image=template.details["Image"], gpus=gpus)
        container = await self._inspect(made)
        if container is None:
            raise DriverError(f"{name} was removed as soon as it was there")
        return container

    def _assign(self, template: WorkerContainer, containers: Sequence[WorkerContainer]) -> tuple[str, ...]:
        if not template.num_gpus:
            return ()
        inventory = self._gpus()
        try:
            return assign(inventory, taken_gpus(containers, inventory), template.num_gpus)
        except NotEnoughGpus as error:
            raise NoCapacity(str(error)) from error

    async def _find(self, worker: WorkerId) -> WorkerContainer | None:
        """The managed container of that worker."""
        container = await self._inspect(container_name(self._project, worker), or_foreign=True)
        return container if container is not None and container.worker == worker else None

    async def _containers(self) -> list[WorkerContainer]:
        listed = await self._engine.containers()
        found = await asyncio.gather(*(self._inspect(str(item["Id"])) for item in listed))
        return [container for container in found if container is not None]

    async def _inspect(self, container: str, or_foreign: bool = False) -> WorkerContainer | None:
        try:
            details = await self._engine.inspect(container)
        except EngineRefused as error:
            if or_foreign and error.status == 403:
                return None
            raise
        try:
            return None if details is None else read_container(details)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DriverError(f"the engine describes {container} in an unknown way: {error!r}") from error

    def _instance(self, container: WorkerContainer) -> Instance:
        state = _STATES.get(container.status, InstanceState.EXITED)
        return Instance(
            key=container.id,
            worker=container.worker,
            model=container.model,
            state=InstanceState.STOPPING if container.id in self._stopping else state,
            started_at=container.started_at,
            exit_code=container.exit_code,
            is_managed=container.is_managed,
        )
