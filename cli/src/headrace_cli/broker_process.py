"""The broker among the supervised processes."""

import asyncio
import secrets
import shutil
import time
from pathlib import Path

import structlog

from headrace_cli.process import ProcessSpec
from headrace_shared.broker import NatsServer
from headrace_shared.errors import BusUnavailable

CHECK_PERIOD_S = 5.0
MIN_ROOM_BYTES = 64 * 1024 * 1024
"""With less on the disk a restart would not help."""

log = structlog.get_logger(__name__)


class BrokerProcess:
    """As `process.Process`, around a NatsServer, which keeps its port over restarts."""

    def __init__(self, server: NatsServer) -> None:
        self._server = server
        self.spec = ProcessSpec("nats", "nats-1", (), {})
        self.id = ""
        self.pid = 0
        self.num_starts = 0
        self.started_at = 0.0
        self.phase = "stopped"

    @property
    def port(self) -> int:
        return self._server.port

    @property
    def log_path(self) -> Path:
        return self._server.log_path

    @property
    def is_alive(self) -> bool:
        return self._server.pid is not None

    async def start(self) -> None:
        """Returns when it answers. Raises OSError."""
        self.id = f"nats-{secrets.token_hex(4)}"
        self.num_starts += 1
        self.started_at = time.monotonic()
        self.phase = "starting"
        try:
            await self._server.start()
        except BusUnavailable as error:
            raise OSError(0, str(error)) from error
        self.pid = self._server.pid or 0
        self.phase = "running"

    async def wait(self) -> int:
        """Also ends a server that cannot store any more, once a new one could."""
        exited = asyncio.ensure_future(self._server.wait())
        try:
            while not exited.done():
                await asyncio.wait((exited,), timeout=CHECK_PERIOD_S)
                await self._check_storage()
            return exited.result() or 0
        finally:
            exited.cancel()

    async def _check_storage(self) -> None:
        if not (problem := await self._server.storage_problem()):
            return
        room = shutil.disk_usage(self._server.data_dir).free
        log.error("the broker stores nothing", problem=problem, free_bytes=room)
        if room >= MIN_ROOM_BYTES:
            await self._server.stop()

    def last_line(self) -> str:
        return f"see {self._server.log_path}"

    def trim_log(self) -> None:
        """nats-server bounds its log itself."""

    async def stop(self, timeout_s: float) -> None:
        """NatsServer has a bound of its own."""
        await self._server.stop()

    async def kill(self) -> None:
        await self._server.kill()
