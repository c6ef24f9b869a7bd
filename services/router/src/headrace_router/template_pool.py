"""Chat templates, rendered in processes that may be killed for it.

A template comes with a model and is a program: it may loop for ever or fill the memory, perhaps only with certain
messages. Each process renders one chat at a time; a model has at most `MODEL_PLACES` of them at a time, so that one bad
template holds up neither other models nor all chats of its own.
"""

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from typing import Any

import structlog

from headrace_router.templates import LENGTH, TEXT, UNKNOWN, TemplateSpec
from headrace_shared.child_environment import child_environment
from headrace_shared.errors import InvalidRequest, Overloaded, ProtocolError

log = structlog.get_logger(__name__)

NUM_PROCESSES = 4
"""At most; one is there from the start, others when they are needed."""
MODEL_PLACES = 2
MAX_WAITING = 1024
START_S = 20.0
"""For a process to start, and to compile a template."""
RENDER_S = 10.0
"""By the clock, for a machine that is busy; the process itself ends after much less of the processor's time."""
MAX_KNOWN = 64
"""Templates that a process is told of; it forgets the oldest."""
MAX_REPLY_BYTES = 512 << 20
PARAM = "messages"
CODE = "template_error"

Probes = list[tuple[str, str] | None]


class _Gone(Exception):
    """The process has ended, as one does whose template takes too much."""


class _NoProcess(_Gone):
    """It cannot be had, for no fault of the template's."""


class _Process:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.known: set[str] = set()
        """Nonces of the templates that it has compiled."""

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None

    async def ask(self, message: bytes, timeout_s: float) -> bytes:
        """Raises _Gone or TimeoutError; it is of no use then."""
        source, sink = self._process.stdout, self._process.stdin
        assert source is not None and sink is not None
        try:
            async with asyncio.timeout(timeout_s):
                sink.write(LENGTH.pack(len(message)) + message)
                await sink.drain()
                length = LENGTH.unpack(await source.readexactly(LENGTH.size))[0]
                if length > MAX_REPLY_BYTES:
                    raise _Gone
                return await source.readexactly(length)
        except TimeoutError:
            raise
        except (OSError, asyncio.IncompleteReadError) as error:
            await self.kill()
            # Its own limits end it in other ways: somebody has killed it, or memory has become short.
            raise (_NoProcess if self._process.returncode == -signal.SIGKILL else _Gone) from error

    async def teach(self, spec: TemplateSpec) -> bytes:
        """Raises _Gone or TimeoutError."""
        reply = await self.ask(json.dumps(["learn", *spec]).encode(), START_S)
        if reply[:1] == TEXT:
            if len(self.known) >= MAX_KNOWN:
                self.known.clear()
            self.known.add(spec.nonce)
        return reply

    async def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()


class TemplatePool:
    def __init__(self) -> None:
        self._idle: list[_Process] = []
        self._places = asyncio.Semaphore(NUM_PROCESSES)
        self._tasks: set[asyncio.Task[Any]] = set()

    def warm_up(self) -> None:
        """Starts a process, without waiting for it."""
        self._own(asyncio.create_task(self._warm_up(), name="template-process"))

    async def learn(self, spec: TemplateSpec) -> Probes:
        """What the template makes of `templates.PROBES`. Raises ProtocolError if it cannot be used."""
        # Twice: a process may end for another reason, and is the first that goes where memory is short.
        for _ in range(2):
            try:
                return read_probes(await self._shielded(self._learn(spec)))
            except (_NoProcess, TimeoutError):
                continue
            except _Gone:
                raise ProtocolError("chat template: it takes too long, or too much memory, to compile") from None
        raise ProtocolError("chat template: no process can be had to compile it")

    async def render(self, spec: TemplateSpec, places: asyncio.Semaphore, message: bytes) -> bytes:
        """UTF-8 of the text, with marks. `places`: of the model. Raises InvalidRequest, or Overloaded if too many are
        waiting."""
        if len(self._tasks) >= MAX_WAITING:
            raise Overloaded("Too many chats are waiting to be rendered.", retry_after_s=1.0)
        try:
            try:
                reply = await self._shielded(self._render(spec, places, message))
            except _NoProcess:
                reply = await self._shielded(self._render(spec, places, message))
        except (_NoProcess, TimeoutError):
            raise Overloaded("Chats cannot be rendered now.", retry_after_s=2.0) from None
        except _Gone:
            log.warning("a chat template was too slow, or took too much memory", num_bytes=len(message))
            problem = "The model's chat template takes too long, or too much memory, with these messages."
            raise InvalidRequest(problem, param=PARAM, code=CODE) from None
        return read_text(reply)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for process in self._idle:
            await process.kill()
        self._idle.clear()

    async def _shielded(self, work: Coroutine[Any, Any, bytes]) -> bytes:
        # Not cut off with its client: the process would have to be killed, which costs everybody else a new one.
        task = asyncio.create_task(work, name="template")
        self._own(task)
        return await asyncio.shield(task)

    def _own(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.add(task)
        task.add_done_callback(self._on_done)

    def _on_done(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # whoever asked may be gone

    async def _warm_up(self) -> None:
        async with self._places:
            self._idle.append(await _start())

    async def _learn(self, spec: TemplateSpec) -> bytes:
        async with self._lent() as process:
            return await process.teach(spec)

    async def _render(self, spec: TemplateSpec, places: asyncio.Semaphore, message: bytes) -> bytes:
        async with places, self._lent() as process:
            if spec.nonce in process.known:
                reply = await process.ask(message, RENDER_S)
                if reply[:1] != UNKNOWN:
                    return reply
            # It is new, or has room for some templates only and has forgotten this one.
            try:
                reply = await process.teach(spec)
            except _Gone as error:
                raise _NoProcess from error
            return reply if reply[:1] != TEXT else await process.ask(message, RENDER_S)

    @contextlib.asynccontextmanager
    async def _lent(self) -> AsyncIterator[_Process]:
        """A process, which comes back unless something goes wrong."""
        async with self._places:
            self._idle = [process for process in self._idle if process.is_alive]
            process = self._idle.pop() if self._idle else await _start()
            try:
                yield process
            except BaseException:
                await process.kill()
                raise
            self._idle.append(process)


async def _start() -> _Process:
    """Raises _NoProcess."""
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "headrace_router.template_process",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=child_environment(),
        )
    except OSError as error:
        raise _NoProcess from error
    return _Process(process)


def read_probes(reply: bytes) -> Probes:
    """Raises ProtocolError."""
    if reply[:1] != TEXT:
        raise ProtocolError(reply[1:].decode())
    return [None if probe is None else (probe[0], probe[1]) for probe in json.loads(reply[1:])]


def read_text(reply: bytes) -> bytes:
    """Raises InvalidRequest."""
    if reply[:1] != TEXT:
        raise InvalidRequest(reply[1:].decode(), param=PARAM, code=CODE)
    return reply[1:]


def render_message(
    spec: TemplateSpec,
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
    *,
    continues: bool,
    is_dynamic: bool,
    max_chars: int,
) -> bytes:
    """For `TemplatePool.render`. Blocking, for chats of megabytes. Raises InvalidRequest."""
    try:
        return json.dumps(["render", spec.nonce, messages, variables, continues, is_dynamic, max_chars]).encode()
    except (RecursionError, ValueError):
        raise InvalidRequest("The messages are nested too deeply.", param=PARAM, code=CODE) from None
