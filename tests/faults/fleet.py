"""A fleet of real processes, any of which may be killed, frozen or told to stop, and is then started again.

Places (`worker-2`) stay; a process is known by its place and its life (`worker-2-life-5`), since ids are never used
twice.
"""

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from headrace_shared.broker import NatsServer
from tests.integration.deployment import Client, Deployment, free_port
from tests.patience import PATIENCE_S

KINDS = ("worker", "scheduler", "router")


@dataclass(frozen=True)
class Shape:
    """How many of each, and with which settings. `engine`: a test's engine, or the real one."""

    model: str
    engine: str = "headrace_worker.engine_process"
    routers: int = 2
    schedulers: int = 2
    workers: int = 2
    router: dict[str, Any] = field(default_factory=dict)
    scheduler: dict[str, Any] = field(default_factory=dict)
    worker: dict[str, Any] = field(default_factory=dict)


class Fleet:
    """Everything that is started is ended with the block of `of`."""

    def __init__(self, server: NatsServer, folder: Path, client: Client, shape: Shape) -> None:
        self.server = server
        self.client = client
        self.deployment = Deployment(server, folder)
        self._folder = folder
        self._shape = shape
        self._ports: dict[str, int] = {}
        self._lives: dict[str, int] = {}
        self._frozen: set[str] = set()

    @classmethod
    @contextlib.asynccontextmanager
    async def of(cls, server: NatsServer, folder: Path, shape: Shape) -> "AsyncIterator[Fleet]":
        async with Client.connect(server.url, hears_tokens=False) as client:
            fleet = cls(server, folder, client, shape)
            try:
                for kind in KINDS:
                    for number in range(getattr(shape, f"{kind}s")):
                        await fleet.start(f"{kind}-{number + 1}")
                await fleet.until_ready()
                yield fleet
            finally:
                for place in list(fleet._frozen):
                    fleet.resume(place)
                await fleet.deployment.close()

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self._ports.values()]

    def places(self, kind: str) -> list[str]:
        return [place for place in self._lives if place.startswith(f"{kind}-")]

    def id_of(self, place: str) -> str:
        return f"{place}-life-{self._lives[place]}"

    def port_of(self, place: str) -> int | None:
        """Of a router."""
        return self._ports.get(place)

    def pid_of(self, place: str) -> int:
        return self.deployment.processes[self.id_of(place)].pid

    async def start(self, place: str) -> None:
        """The place's next life."""
        self._lives[place] = self._lives.get(place, 0) + 1
        kind, name, shape = place.partition("-")[0], self.id_of(place), self._shape
        if kind == "worker":
            await self.deployment.worker(name, model=shape.model, engine=shape.engine, **shape.worker)
        elif kind == "scheduler":
            await self.deployment.scheduler(name, model=shape.model, **shape.scheduler)
        else:
            port = self._ports.setdefault(place, free_port())
            settings = {"port": port, "drain_delay_s": 0.3, **shape.router}
            await self.deployment._start("headrace_router", name, settings, {})

    async def kill(self, place: str) -> None:
        """SIGKILL, and a new life at once."""
        await self.deployment.kill(self.id_of(place))
        await self.start(place)

    async def stop(self, place: str, timeout_s: float = 2 * PATIENCE_S) -> tuple[int, float]:
        """SIGTERM. Returns the exit code and how long it took."""
        started_at = time.monotonic()
        code = await self.deployment.stop(self.id_of(place), timeout_s)
        return code, time.monotonic() - started_at

    async def restart(self, place: str) -> None:
        """SIGTERM, and a new life once it has ended."""
        await self.stop(place)
        await self.start(place)

    def freeze(self, place: str) -> None:
        self._frozen.add(place)
        self.deployment.signal(self.id_of(place), signal.SIGSTOP)

    def resume(self, place: str) -> None:
        self._frozen.discard(place)
        self.deployment.signal(self.id_of(place), signal.SIGCONT)

    async def is_ready(self, place: str) -> bool:
        """It works, as far as it says itself."""
        process = self.deployment.processes.get(self.id_of(place))
        if process is None or process.returncode is not None or place in self._frozen:
            return False
        if place in self._ports:
            async with httpx.AsyncClient(timeout=10.0, trust_env=False) as http:
                with contextlib.suppress(httpx.HTTPError):
                    return (await http.get(f"http://127.0.0.1:{self._ports[place]}/health")).status_code == 200
            return False
        telemetry = self.client.telemetry.get(self.id_of(place))
        return telemetry is not None and telemetry.state not in ("starting", "loading", "draining", "leaving")

    async def num_ready(self, kind: str) -> int:
        return sum([await self.is_ready(place) for place in self.places(kind)])

    async def until_ready(self, *places: str, timeout_s: float = 120.0) -> None:
        """All places, if none are given."""
        deadline = time.monotonic() + timeout_s
        for place in places or list(self._lives):
            while not await self.is_ready(place):
                assert time.monotonic() < deadline, (
                    f"{place} is not ready after {timeout_s} s:\n{self.log(place)[-2000:]}"
                )
                await asyncio.sleep(0.1)

    def log(self, place: str) -> str:
        return self.deployment.log(self.id_of(place))

    def all_logs(self) -> str:
        """Of every life of everybody."""
        return "".join(path.read_text() for path in sorted(self._folder.glob("*.log")))
