"""Asks the token log what became of requests whose former owner, or whose worker, is gone, before they go on: their
users may have got more than anybody who is left has heard of.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import NamedTuple

import structlog

from headrace_scheduler.decisions import ChoiceLog
from headrace_scheduler.scheduler import Scheduler
from headrace_scheduler.sequence import OwnedRequest
from headrace_scheduler.token_log import RequestLog, read_beyond, read_log
from headrace_shared.bus import Bus
from headrace_shared.errors import BusError
from headrace_shared.messages import RequestId

MAX_CONCURRENT = 8
RETRY_S = 0.5
WINDOW = 1024
"""Messages at the end of all logs, among which is looked for what a lost worker had told and not reported,"""
WINDOW_ITERATIONS = 16
"""and so many more for each sequence that runs: a worker reports every fourth iteration at the latest."""

log = structlog.get_logger(__name__)


class _Question(NamedTuple):
    core: Scheduler
    """Whose request it is: one that has been replaced wants no answer."""
    request_id: RequestId
    is_new: bool


class LookBack:
    """`run` is its task. What waits for it is bounded by the requests that the core holds."""

    def __init__(
        self,
        bus: Bus,
        core: Callable[[], Scheduler],
        *,
        on_ended: Callable[[RequestId, str], Awaitable[None]],
        wake: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        """`on_ended`: a request has had its terminal event before, and the core has forgotten it; with its ack subject.
        `wake` is called when the core may act on an answer."""
        self._bus = bus
        self._core = core
        self._on_ended = on_ended
        self._wake = wake
        self._clock = clock
        self._questions: asyncio.Queue[_Question] = asyncio.Queue()

    def ask(self, request_ids: Iterable[RequestId], *, are_new: bool) -> None:
        """About requests of the core as it is now. `are_new`: taken over from another scheduler, of which nothing is
        known but one worker's snapshot; else they were ours, and have lost their worker."""
        for request_id in request_ids:
            self._questions.put_nowait(_Question(self._core(), request_id, are_new))

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(MAX_CONCURRENT):
                group.create_task(self._work(), name=f"look-back-{number}")

    async def _work(self) -> None:
        while True:
            question = await self._questions.get()
            core, request_id = question.core, question.request_id
            while core is self._core() and (owned := core.request(request_id)) is not None:
                try:
                    known = await self._read(owned, question.is_new)
                except BusError as error:
                    log.info("token log not readable yet", request_id=request_id, error=str(error))
                    await asyncio.sleep(RETRY_S)
                    continue
                if core is self._core():
                    await self._tell(core, request_id, known)
                break

    async def _read(self, owned: OwnedRequest, is_new: bool) -> RequestLog:
        request = owned.request
        if is_new:
            return await read_log(self._bus, request.router, request.request_id)
        known = {each.choice: ChoiceLog(each.output, each.last_attempt or 0) for each in owned.sequences}
        window = WINDOW + WINDOW_ITERATIONS * self._core().gauges().num_running
        return await read_beyond(self._bus, request, known, window)

    async def _tell(self, core: Scheduler, request_id: RequestId, known: RequestLog) -> None:
        if not known.has_ended:
            core.restore(request_id, known.choices, self._clock())
        elif (message := core.forget(request_id)) is not None:
            await self._on_ended(request_id, message[0])
        self._wake()
