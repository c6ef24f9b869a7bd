"""One child process of `headrace up`: its command, its current life, its end."""

import asyncio
import contextlib
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

from headrace_cli.log_file import LogFile
from headrace_shared.tether import tethered

GIVE_UP_S = 5.0
"""Longest wait for the kernel to remove a killed process."""


class ProcessSpec(NamedTuple):
    service: str
    name: str
    """Unique in this instance, such as worker-2; names the log file."""
    command: tuple[str, ...]
    environ: Mapping[str, str]
    port: int = 0
    """Where it listens; 0: nowhere."""
    model: str = ""


class Supervised(Protocol):
    """What the supervisor needs of a process; `Process` and `BrokerProcess` are such."""

    spec: ProcessSpec
    id: str
    """Of the current life; each start has a new one."""
    pid: int
    num_starts: int
    started_at: float
    """Monotonic."""
    phase: str
    """starting, running, restarting, failed, stopping or stopped. What the service itself says is more exact."""

    @property
    def port(self) -> int: ...

    @property
    def log_path(self) -> Path: ...

    @property
    def is_alive(self) -> bool: ...

    async def start(self) -> None:
        """Starts a new life, whose processes die with us even if we are killed. Raises OSError."""
        ...

    async def wait(self) -> int:
        """The exit code, once it has ended and what it left behind has been killed."""
        ...

    def last_line(self) -> str: ...

    def trim_log(self) -> None: ...

    async def stop(self, timeout_s: float) -> None: ...

    async def kill(self) -> None: ...


class Process:
    """A service and the process that currently embodies it."""

    def __init__(self, spec: ProcessSpec, log_dir: Path) -> None:
        self.spec = spec
        self.log = LogFile(log_dir / f"{spec.name}.log")
        self.id = ""
        self.pid = 0
        self.num_starts = 0
        self.started_at = 0.0
        self.phase = "stopped"
        self.pass_fds: tuple[int, ...] = ()
        """Descriptors that the next life inherits."""
        self.extra_environ: Mapping[str, str] = {}
        """Of the next life."""
        self._child: asyncio.subprocess.Process | None = None

    @property
    def port(self) -> int:
        return self.spec.port

    @property
    def log_path(self) -> Path:
        return self.log.path

    @property
    def is_alive(self) -> bool:
        return self._child is not None and self._child.returncode is None

    def new_id(self) -> str:
        return f"{self.spec.service}-{secrets.token_hex(4)}"

    async def start(self) -> None:
        self.id = self.new_id()
        log = self.log.open_if_possible()
        try:
            self._child = await asyncio.create_subprocess_exec(
                *tethered(self.spec.command, signal.SIGKILL),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**self.spec.environ, **self.extra_environ, "HEADRACE_SERVICE_ID": self.id},
                start_new_session=True,
                pass_fds=self.pass_fds,
            )
        finally:
            os.close(log)
        self.pid = self._child.pid
        self.num_starts += 1
        self.started_at = time.monotonic()
        self.phase = "running"

    async def wait(self) -> int:
        assert self._child is not None, "wait() before start()"
        code = await self._child.wait()
        self._kill_group()
        return code

    def last_line(self) -> str:
        """The last line of its current life's log."""
        return self.log.last_line()

    def trim_log(self) -> None:
        self.log.trim()

    async def stop(self, timeout_s: float) -> None:
        """Asks it to drain and end, kills it after `timeout_s`."""
        if self._child is None:
            return
        if self.is_alive:
            self._child.terminate()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._child.wait()
        await self.kill()

    async def kill(self) -> None:
        """Kills its whole process group."""
        if self._child is None:
            return
        self._kill_group()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GIVE_UP_S):
                await self._child.wait()

    def _kill_group(self) -> None:
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._child.pid, signal.SIGKILL)
