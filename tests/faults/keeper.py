"""Starts a new worker for each one that dies, as a supervisor does, and counts the deaths."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from tests.integration.deployment import Deployment

POLL_S = 0.05


class Keeper:
    def __init__(self, deployment: Deployment, settings: dict[str, Any]) -> None:
        self._deployment = deployment
        self._settings = settings
        self._num_started = 0
        self.deaths: list[str] = []
        """Names of the workers that have died."""

    @classmethod
    @contextlib.asynccontextmanager
    async def of(cls, deployment: Deployment, num_workers: int, **settings: Any) -> "AsyncIterator[Keeper]":
        """Keeps so many workers alive until the block is left."""
        keeper = cls(deployment, settings)
        for _ in range(num_workers):
            await keeper._start()
        task = asyncio.create_task(keeper._run())
        try:
            yield keeper
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    @property
    def workers(self) -> list[str]:
        """Names of those that live."""
        return [name for name in self._deployment.processes if name.startswith("worker-")]

    async def _start(self) -> None:
        self._num_started += 1
        await self._deployment.worker(f"worker-{self._num_started}", **self._settings)

    async def _run(self) -> None:
        while True:
            for name in self.workers:
                if self._deployment.processes[name].returncode is not None:
                    del self._deployment.processes[name]
                    self.deaths.append(name)
                    await self._start()
            await asyncio.sleep(POLL_S)
