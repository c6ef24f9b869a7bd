"""Tells routers what became of a request, for a person who looks at it.

The recordings are replayed in a process of its own, at low priority: it takes seconds, and grants must not wait for it.
"""

import asyncio
import struct
from collections import OrderedDict

import msgspec
import structlog

from headrace_shared.bus import Bus, Message
from headrace_shared.child_environment import child_environment
from headrace_shared.codec import decode, encode
from headrace_shared.errors import BusError, ProtocolError
from headrace_shared.messages import RequestId, RouterId, SchedulerId
from headrace_shared.python_module import python_module
from headrace_shared.record_messages import Story, StoryLine, StoryQuery
from headrace_shared.subjects import ALL_FLIGHTS, FLIGHT, story_query_subject, story_subject

MAX_WAITING = 16
"""Questions; further ones are not answered."""
REPLAY_S = 20.0
MAX_MESSAGES = 1_000_000
MAX_LINES = 500
LENGTH = struct.Struct(">I")

log = structlog.get_logger(__name__)


class Storyteller:
    """`run` is its task. One question at a time."""

    def __init__(self, bus: Bus, scheduler: SchedulerId) -> None:
        self._bus = bus
        self._scheduler = scheduler
        self._waiting: OrderedDict[RequestId, RouterId] = OrderedDict()
        self._has_some = asyncio.Event()

    async def run(self) -> None:
        queries = await self._bus.subscribe(story_query_subject(self._scheduler), self._on_query)
        try:
            while True:
                await self._has_some.wait()
                while self._waiting:
                    request_id, router = self._waiting.popitem(last=False)
                    self._tell(router, await self._story(request_id))
                self._has_some.clear()
        finally:
            await queries.close()

    def _on_query(self, message: Message) -> None:
        try:
            query = decode(message.data, StoryQuery)
        except ProtocolError as error:
            log.warning("undecodable query", error=str(error))
            return
        if len(self._waiting) < MAX_WAITING:
            self._waiting[query.request_id] = query.router
            self._has_some.set()

    def _tell(self, router: RouterId, story: Story) -> None:
        try:
            self._bus.publish(story_subject(router), encode(story))
        except BusError as error:
            log.info("story not told", request_id=story.request_id, error=str(error))

    async def _story(self, request_id: RequestId) -> Story:
        problem = ""
        try:
            lines = await self._replay(request_id)
            if not lines:
                problem = "The flight recording knows nothing of it."
            elif len(lines) > MAX_LINES:
                problem = f"Only the first {MAX_LINES} of {len(lines)} lines are shown."
            return Story(request_id=request_id, lines=tuple(lines[:MAX_LINES]), problem=problem)
        except BusError as error:
            problem = f"The flight recording cannot be read: {error}"
        except TimeoutError:
            problem = f"Replaying the flight recording takes longer than {REPLAY_S:.0f} s."
        except (OSError, ProtocolError) as error:
            problem = f"The flight recording cannot be replayed: {error}"
        return Story(request_id=request_id, problem=problem)

    async def _replay(self, request_id: RequestId) -> list[StoryLine]:
        messages = await self._bus.read(FLIGHT.name, ALL_FLIGHTS, MAX_MESSAGES)
        return await _run(await asyncio.to_thread(_join, messages), request_id)


def _join(messages: list[Message]) -> bytes:
    return b"".join(LENGTH.pack(len(message.data)) + message.data for message in messages)


async def _run(recording: bytes, request_id: RequestId) -> list[StoryLine]:
    """Raises TimeoutError, OSError, ProtocolError."""
    process = await asyncio.create_subprocess_exec(
        *python_module("headrace_scheduler.story", "--json", "-", request_id),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=child_environment(),
    )
    try:
        async with asyncio.timeout(REPLAY_S):
            output, errors = await process.communicate(recording)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        log.warning("a recording could not be replayed", errors=errors.decode(errors="replace").strip()[-2000:])
        raise ProtocolError(f"the replay ended with exit code {process.returncode}")
    try:
        return msgspec.json.decode(output, type=list[StoryLine])
    except msgspec.DecodeError as error:
        raise ProtocolError(str(error)) from error
