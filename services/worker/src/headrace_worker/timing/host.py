"""A process of timing-model workers: one as any other worker process, or many, each of them a worker of its own.

Of many, each has its own id, connection, lease and loop. One that fails ends alone, as a process would; the process
ends when all have drained, and with an error when the last one has failed.
"""

import asyncio

import structlog

from headrace_shared.errors import ConfigError, HeadraceError
from headrace_shared.service import Service
from headrace_shared.service_bus import service_bus
from headrace_worker.service import WorkerService
from headrace_worker.settings import WorkerSettings
from headrace_worker.timing.cards import Cards
from headrace_worker.timing.link import TimingLink

log = structlog.get_logger(__name__)


class WorkersFailed(HeadraceError):
    """All workers of the process have ended, some of them not because they were told to."""


class TimingHost:
    def __init__(self, service: Service, settings: WorkerSettings) -> None:
        self._service = service
        self._settings = settings
        self._cards = Cards()
        self._failures: list[tuple[str, HeadraceError | None]] = []
        """Which workers failed, and of what if they do not say it in the log."""

    async def run(self) -> None:
        """The body of the service. Raises ConfigError, or what ended the only worker, or WorkersFailed."""
        if self._settings.num_nodes > 1:
            raise ConfigError("num_nodes", "not with engine timing: tensor_parallel is the number of GPUs")
        if self._settings.workers == 1:
            await self._run_worker(self._service)
            return
        workers = [
            Service(self._service.name, f"{self._service.id}-{number}")
            for number in range(1, self._settings.workers + 1)
        ]
        self._service.set_ready(lambda: next((why for each in workers if (why := each.not_ready())), None))
        drain = self._service.spawn(self._pass_on(workers), "drain")
        async with asyncio.TaskGroup() as group:
            for worker in workers:
                group.create_task(self._keep_apart(worker), name=worker.id)
        drain.cancel()
        if self._failures:
            failed, error = self._failures[-1]
            if isinstance(error, ConfigError):
                raise error  # the same for each of them
            last = f"{failed}: {error or 'see its log'}"
            raise WorkersFailed(f"{len(self._failures)} of {len(workers)} workers failed, the last one {last}")

    async def _run_worker(self, service: Service) -> None:
        async with service_bus(service, self._settings) as bus:
            await WorkerService(service, bus, self._settings, start=self._start).run()

    async def _start(self, settings: WorkerSettings) -> TimingLink:
        num_gpus = settings.tensor_parallel * settings.pipeline_parallel
        return TimingLink(settings, settings.engine_config(), num_gpus, self._cards)

    async def _keep_apart(self, service: Service) -> None:
        structlog.contextvars.bind_contextvars(worker=service.id)
        try:
            code = await service.run(self._run_worker, self._settings.drain_timeout_s)
        except HeadraceError as error:
            log.error("worker failed", reason=str(error))
            self._failures.append((service.id, error))
            return
        if code:
            self._failures.append((service.id, None))

    async def _pass_on(self, workers: list[Service]) -> None:
        await self._service.draining.wait()
        for worker in workers:
            worker.drain()
