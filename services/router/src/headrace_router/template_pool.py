"""Chat templates, rendered in processes that may be killed for it.

A template comes with a model and is a program: it may loop for ever or fill the memory, perhaps only with certain
messages. Each process renders one chat at a time; a model has at most `MODEL_PLACES` of them at a time, so that one bad
template holds up neither other models nor all chats of its own.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from typing import Any, NamedTuple

import structlog

from headrace_router.helper import Helper, HelperGone, NoHelper
from headrace_router.templates import TEXT, UNKNOWN, TemplateSpec
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
MAX_REPLY_BYTES = 64 << 20
PARAM = "messages"
CODE = "template_error"

Probes = list[tuple[str, str] | None]


class _Renderer(NamedTuple):
    helper: Helper
    known: set[str]
    """Nonces of the templates that it has compiled."""

    async def teach(self, spec: TemplateSpec) -> bytes:
        """Raises HelperGone or TimeoutError."""
        reply = await self.helper.ask(json.dumps(["learn", *spec]).encode(), START_S)
        if reply[:1] == TEXT:
            if len(self.known) >= MAX_KNOWN:
                self.known.clear()
            self.known.add(spec.nonce)
        return reply


class TemplatePool:
    def __init__(self) -> None:
        self._idle: list[_Renderer] = []
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
            except (NoHelper, TimeoutError):
                continue
            except HelperGone:
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
            except NoHelper:
                reply = await self._shielded(self._render(spec, places, message))
        except (NoHelper, TimeoutError):
            raise Overloaded("Chats cannot be rendered now.", retry_after_s=2.0) from None
        except HelperGone:
            log.warning("a chat template was too slow, or took too much memory", num_bytes=len(message))
            problem = "The model's chat template takes too long, or too much memory, with these messages."
            raise InvalidRequest(problem, param=PARAM, code=CODE) from None
        return read_text(reply)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for renderer in self._idle:
            await renderer.helper.kill()
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
        async with self._lent() as renderer:
            return await renderer.teach(spec)

    async def _render(self, spec: TemplateSpec, places: asyncio.Semaphore, message: bytes) -> bytes:
        async with places, self._lent() as renderer:
            if spec.nonce in renderer.known:
                reply = await renderer.helper.ask(message, RENDER_S)
                if reply[:1] != UNKNOWN:
                    return reply
            # It is new, or has room for some templates only and has forgotten this one.
            try:
                reply = await renderer.teach(spec)
            except HelperGone as error:
                raise NoHelper from error
            return reply if reply[:1] != TEXT else await renderer.helper.ask(message, RENDER_S)

    @contextlib.asynccontextmanager
    async def _lent(self) -> AsyncIterator[_Renderer]:
        """One that comes back unless something goes wrong."""
        async with self._places:
            self._idle = [renderer for renderer in self._idle if renderer.helper.is_alive]
            renderer = self._idle.pop() if self._idle else await _start()
            try:
                yield renderer
            except BaseException:
                await renderer.helper.kill()
                raise
            self._idle.append(renderer)


async def _start() -> _Renderer:
    """Raises NoHelper."""
    return _Renderer(await Helper.start("headrace_router.template_process", max_reply_bytes=MAX_REPLY_BYTES), set())


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
        message = ["render", spec.nonce, messages, variables, continues, is_dynamic, max_chars]
        # Escapes would take three times as much. JSON can hold half a surrogate pair, and its reader takes it so.
        return json.dumps(message, ensure_ascii=False).encode(errors="surrogatepass")
    except (RecursionError, ValueError):
        raise InvalidRequest("The messages are nested too deeply.", param=PARAM, code=CODE) from None
