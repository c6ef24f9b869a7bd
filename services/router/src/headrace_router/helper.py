"""A process of the router's own that may be killed for what it works at: it answers one message at a time."""

import asyncio
import contextlib
import resource
import signal
import sys
from pathlib import Path

from headrace_router.helper_process import LENGTH
from headrace_shared.child_environment import child_environment
from headrace_shared.python_module import python_module

CLOSING_S = 2.0
"""For a process to end that has closed its output."""


class HelperGone(Exception):
    """The process has ended, as one does that its work takes over a limit."""


class NoHelper(HelperGone):
    """It cannot be had, for no fault of its work's."""


class Helper:
    def __init__(self, process: asyncio.subprocess.Process, max_reply_bytes: int) -> None:
        self._process = process
        self._max_reply_bytes = max_reply_bytes

    @classmethod
    async def start(cls, module: str, *, max_reply_bytes: int) -> "Helper":
        """`module`: it serves with `helper_process.serve`. Raises NoHelper."""
        try:
            process = await asyncio.create_subprocess_exec(
                *python_module(module),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=child_environment(),
            )
        except OSError as error:
            raise NoHelper from error
        return cls(process, max_reply_bytes)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None

    def limit_growth(self, num_bytes: int) -> None:
        """Its address space may become so much larger than it is now, within the limit that it has given itself; it may
        have no right to change that itself. Linux only. Not before its first answer."""
        if sys.platform == "linux":
            # It may have ended.
            with contextlib.suppress(OSError, ValueError, IndexError):
                taken = int(Path(f"/proc/{self.pid}/statm").read_text().split()[0]) * resource.getpagesize()
                _, most = resource.prlimit(self.pid, resource.RLIMIT_AS)
                if most != resource.RLIM_INFINITY:
                    resource.prlimit(self.pid, resource.RLIMIT_AS, (min(taken + num_bytes, most), most))

    async def ask(self, message: bytes, timeout_s: float) -> bytes:
        """Raises HelperGone or TimeoutError: it has been killed then, or must be."""
        source, sink = self._process.stdout, self._process.stdin
        assert source is not None and sink is not None
        try:
            async with asyncio.timeout(timeout_s):
                sink.write(LENGTH.pack(len(message)) + message)
                await sink.drain()
                num_bytes = LENGTH.unpack(await source.readexactly(LENGTH.size))[0]
                if num_bytes > self._max_reply_bytes:
                    raise HelperGone
                return await source.readexactly(num_bytes)
        except TimeoutError:
            raise
        except (OSError, asyncio.IncompleteReadError) as error:
            # Its own limits end it in other ways: somebody has killed it, or memory has become short.
            raise (NoHelper if await self._exit_code() == -signal.SIGKILL else HelperGone) from error

    async def _exit_code(self) -> int | None:
        """Of a process that has closed its output. None: it had to be killed."""
        # Waited for first: asyncio's kill() reaps one that has ended already, and its waiter then knows no code.
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(self._process.wait(), CLOSING_S)
        await self.kill()
        return None

    async def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
