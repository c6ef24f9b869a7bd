"""The I/O process's end of the engine process: start it, send frames, read frames, end it."""

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from headrace_shared import codec
from headrace_shared.errors import HeadraceError
from headrace_shared.python_module import python_module
from headrace_shared.tether import tethered
from headrace_worker.engine_frames import HEADER, MAX_FRAME_BYTES, FromEngine

MAX_UNSENT_BYTES = 64 * 1024 * 1024
"""An engine that reads nothing for so long that this much waits for it hangs."""
KILL_TIMEOUT_S = 2.0
BOUNDED_SPINNING = {"GOMP_SPINCOUNT": "1000"}
"""OpenMP threads that wait for each other spin for microseconds, then sleep. By default they spin for milliseconds, and
where another process needs a core, each of the hundred barriers of an iteration costs that long. Read by the library
when it is loaded, hence from the environment; a user's own value wins."""


class EngineDied(HeadraceError):
    """The engine process ended or closed its end; `exit_code` is None if it still had to be killed."""

    def __init__(self, exit_code: int | None) -> None:
        how = "closed its connection" if exit_code is None else f"ended with exit code {exit_code}"
        super().__init__(f"the engine process {how}")
        self.exit_code = exit_code


class AnyLink(Protocol):
    """An engine as the service sees it: a process, a group of them, or one that only takes their time."""

    @property
    def pid(self) -> int: ...

    @property
    def pids(self) -> Sequence[int]:
        """Of all processes that compute."""
        ...

    def send(self, frame: Struct) -> None: ...

    def send_bytes(self, data: bytes) -> None:
        """An encoded frame. Raises EngineDied if the engine has stopped reading."""
        ...

    async def read(self) -> FromEngine:
        """The next frame. Raises EngineDied, or another HeadraceError, at the end."""
        ...

    async def close(self) -> None:
        """Ends the engine. Idempotent."""
        ...


class EngineLink:
    """One engine process. Belongs to one event loop."""

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def start(
        cls, module: str, *, inherited: Sequence[int] = (), environ: Mapping[str, str] | None = None
    ) -> "EngineLink":
        """Starts `python -m module FD`. Its stderr is ours. It dies with us, also while it still imports its libraries
        or loads its model. `inherited`: further descriptors that it has under the same numbers; `environ`: set in its
        environment unless the user has set it."""
        ours, theirs = socket.socketpair()
        try:
            process = await asyncio.create_subprocess_exec(
                *tethered(python_module(module, str(theirs.fileno())), signal.SIGKILL),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), *inherited),
                env={**BOUNDED_SPINNING, **(environ or {}), **os.environ},
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        reader, writer = await asyncio.open_connection(sock=ours)
        return cls(process, reader, writer)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def pids(self) -> Sequence[int]:
        return (self.pid,)

    def signal(self, number: signal.Signals) -> None:
        """Sends the process a signal, if it is still there."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def send(self, frame: Struct) -> None:
        self.send_bytes(codec.encode(frame))

    def send_bytes(self, data: bytes) -> None:
        """Sends an encoded frame. Raises EngineDied if the engine has stopped reading; that it has ended is for
        `read` to tell, which waits for how."""
        transport = self._writer.transport
        if transport.is_closing():
            return
        if transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            raise EngineDied(self._process.returncode)
        self._writer.write(HEADER.pack(len(data)) + data)

    async def read(self) -> FromEngine:
        """The next frame. Raises EngineDied at the end."""
        try:
            (size,) = HEADER.unpack(await self._reader.readexactly(HEADER.size))
            if size > MAX_FRAME_BYTES:
                raise EngineDied(self._process.returncode)
            data = await self._reader.readexactly(size)
        except (asyncio.IncompleteReadError, OSError) as error:
            raise EngineDied(await self._wait(KILL_TIMEOUT_S)) from error
        frame: FromEngine = codec.decode(data, FromEngine)
        return frame

    async def close(self) -> None:
        """Ends the process: it has no state worth keeping. Idempotent."""
        self._writer.close()
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                self._process.kill()
            await self._wait(KILL_TIMEOUT_S)

    async def _wait(self, timeout_s: float) -> int | None:
        try:
            async with asyncio.timeout(timeout_s):
                return await self._process.wait()
        except TimeoutError:
            return None
