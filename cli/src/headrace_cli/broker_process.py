"""The broker among the supervised processes."""

import asyncio
import secrets
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import structlog

from headrace_cli.preflight import show_bytes
from headrace_cli.process import ProcessSpec
from headrace_cli.state_file import readable
from headrace_shared.broker import NatsServer
from headrace_shared.errors import BusUnavailable, ConfigError

CHECK_PERIOD_S = 5.0
MIN_ROOM_BYTES = 64 * 1024 * 1024
"""With less on the disk a restart would not help."""
ROOM_PERIOD_S = 1.0

log = structlog.get_logger(__name__)


class BrokerProcess:
    """As `process.Process`, around a NatsServer, which keeps its port over restarts."""

    def __init__(self, server: NatsServer, say: Callable[[str], None] = lambda _: None) -> None:
        self._server = server
        self._say = say
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
        """Returns when it answers. One that ended on a full disk is started once there is room. Raises OSError."""
        if self.num_starts:
            await self._until_room()
        self.id = f"nats-{secrets.token_hex(4)}"
        self.num_starts += 1
        self.started_at = time.monotonic()
        self.phase = "starting"
        try:
            await self._server.start()
        except (BusUnavailable, ConfigError) as error:
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
        room = self._room()
        log.error("the broker stores nothing", problem=problem, free_bytes=room)
        if room >= MIN_ROOM_BYTES:
            await self._server.stop()

    async def _until_room(self) -> None:
        is_told = False
        while True:
            if (room := self._room()) >= MIN_ROOM_BYTES:
                return
            if not is_told:
                where = self._server.data_dir
                self._say(f"{self.spec.name} waits for room on the disk: {show_bytes(room)} free at {readable(where)}")
            is_told = True
            await asyncio.sleep(ROOM_PERIOD_S)

    def _room(self) -> int:
        return shutil.disk_usage(self._server.data_dir).free

    def last_line(self) -> str:
        return f"see {self._server.log_path}"

    def trim_log(self) -> None:
        """nats-server bounds its log itself."""

    async def stop(self, timeout_s: float) -> None:
        """NatsServer has a bound of its own."""
        await self._server.stop()

    async def kill(self) -> None:
        await self._server.kill()
