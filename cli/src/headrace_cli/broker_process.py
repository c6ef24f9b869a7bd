"""The broker among the supervised processes."""

import secrets
import time
from pathlib import Path

from headrace_cli.process import ProcessSpec
from headrace_shared.broker import NatsServer
from headrace_shared.errors import BusUnavailable


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
        return await self._server.wait() or 0

    def last_line(self) -> str:
        return f"see {self._server.log_path}"

    def trim_log(self) -> None:
        """nats-server bounds its log itself."""

    async def stop(self, timeout_s: float) -> None:
        """NatsServer has a bound of its own."""
        await self._server.stop()

    async def kill(self) -> None:
        await self._server.kill()
