"""Asks schedulers what became of a request. They replay their flight recordings for it, which takes a while."""

import asyncio
from collections.abc import Callable, Sequence

import structlog

from headrace_shared.bus import Bus, Message
from headrace_shared.codec import decode, encode
from headrace_shared.errors import BusError, Overloaded, ProtocolError
from headrace_shared.messages import RequestId, RouterId, SchedulerId
from headrace_shared.record_messages import Story, StoryLine, StoryQuery
from headrace_shared.subjects import story_query_subject, story_subject

ANSWER_S = 25.0
MAX_ASKED = 8
"""Questions at once."""

log = structlog.get_logger(__name__)


class Stories:
    """`run` is its task."""

    def __init__(self, bus: Bus, router: RouterId, schedulers_of: Callable[[str], Sequence[str]]) -> None:
        """`schedulers_of`: ids of those that serve a model now."""
        self._bus = bus
        self._router = router
        self._schedulers_of = schedulers_of
        self._asked: dict[RequestId, asyncio.Future[Story]] = {}

    async def run(self) -> None:
        told = await self._bus.subscribe(story_subject(self._router), self._on_story)
        try:
            await asyncio.Event().wait()
        finally:
            await told.close()

    async def ask(self, request_id: RequestId, model: str) -> tuple[tuple[StoryLine, ...], str]:
        """(lines, what is wrong with them; empty: nothing). Raises Overloaded."""
        able = self._schedulers_of(model)
        if not able:
            return (), "No scheduler of this model is running."
        asked = self._asked.get(request_id)
        if asked is None:
            if len(self._asked) >= MAX_ASKED:
                raise Overloaded("Too many requests are being looked at.", retry_after_s=2.0, code="too_many_watchers")
            asked = self._asked[request_id] = asyncio.get_running_loop().create_future()
            query = StoryQuery(request_id=request_id, router=self._router)
            try:
                # Any of them knows all recordings, since they are in the broker.
                self._bus.publish(story_query_subject(SchedulerId(min(able))), encode(query))
            except BusError as error:
                del self._asked[request_id]
                return (), f"The broker cannot be reached: {error}"
        try:
            async with asyncio.timeout(ANSWER_S):
                story = await asyncio.shield(asked)
        except TimeoutError:
            return (), "The scheduler did not answer in time."
        finally:
            self._asked.pop(request_id, None)
        return story.lines, story.problem

    def _on_story(self, message: Message) -> None:
        try:
            story = decode(message.data, Story)
        except ProtocolError as error:
            log.warning("undecodable story", error=str(error))
            return
        asked = self._asked.get(story.request_id)
        if asked is not None and not asked.done():
            asked.set_result(story)
