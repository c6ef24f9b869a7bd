"""When an instance is complete: every router is healthy, every worker ready, and a real generation has succeeded."""

import asyncio
import time

import httpx

from headrace_cli.errors import CommandError
from headrace_cli.fleet_view import FleetView
from headrace_cli.probe import base_url, generate
from headrace_cli.process import Supervised
from headrace_cli.settings import UpSettings
from headrace_cli.supervisor import Supervisor

PERIOD_S = 0.25
HEALTH_TIMEOUT_S = 5.0
MAX_REFUSALS = 20
"""Generations that may fail, once everything says it is ready."""
REFUSAL_DELAY_S = 1.0


class Readiness:
    def __init__(
        self, supervisor: Supervisor, view: FleetView, settings: UpSettings, client: httpx.AsyncClient
    ) -> None:
        self._supervisor = supervisor
        self._view = view
        self._settings = settings
        self._client = client

    async def wait(self) -> None:
        """Raises CommandError when nothing has moved for `start_timeout_s`, or generations keep failing."""
        await self._wait_for_services()
        for index in range(self._settings.routers):
            port = self._settings.port + index
            for model in self._settings.models:
                await self._wait_for_generation(base_url(self._settings.host, port), model.name)
            for process in self._supervisor.processes:
                if process.spec.service == "router" and process.port == port:
                    self._view.found_ready(process.id)

    async def _wait_for_services(self) -> None:
        moved_at, before = time.monotonic(), ""
        while missing := await self._missing():
            now = str([(process.id, self._view.of(process.id)) for process in self._supervisor.processes])
            if now != before:
                moved_at, before = time.monotonic(), now
            if time.monotonic() - moved_at > self._settings.start_timeout_s:
                problem = f"no progress for {self._settings.start_timeout_s:g} s; not ready: {', '.join(missing)}"
                raise CommandError(problem, "see the logs, or set a longer --start-timeout-s")
            await asyncio.sleep(PERIOD_S)

    async def _missing(self) -> list[str]:
        processes = list(self._supervisor.processes)
        missing = [process.spec.name for process in processes if not await self._is_ready(process)]
        # Workers that an autoscaler starts may be gone for a moment.
        served = {process.spec.model for process in processes if process.spec.service == "worker"}
        return missing + [f"worker of {model.name}" for model in self._settings.models if model.name not in served]

    async def _is_ready(self, process: Supervised) -> bool:
        if process.phase != "running":
            return False
        if process.spec.service == "worker":
            return self._view.of(process.id).is_ready
        if process.spec.service == "router":
            try:
                url = base_url(self._settings.host, process.port)
                return (await self._client.get(f"{url}/health", timeout=HEALTH_TIMEOUT_S)).status_code == 200
            except httpx.HTTPError:
                return False
        return True

    async def _wait_for_generation(self, url: str, model: str) -> None:
        problem: str | None = ""
        for _ in range(MAX_REFUSALS):
            problem = await generate(self._client, url, model)
            if problem is None:
                return
            await asyncio.sleep(REFUSAL_DELAY_S)
        raise CommandError(f"{url} generates nothing with {model}: {problem}", "see the logs")
