"""Stops work that nobody waits for any more.

A Cancel is stored in the stream of tombstones and heard by all schedulers at once. Whoever has pulled the request ends
it; whoever pulls it later meets the tombstone. A request that nobody has pulled is also deleted from the queue, so that
it does not hold a place there, and then the router writes its terminal event. The order makes that safe: a scheduler
that pulled just before the deletion hears the Cancel, and gets some time to write the event first.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

import structlog

from headrace_router.inflight import InFlightTable, Mailbox
from headrace_shared.bus import Bus
from headrace_shared.codec import encode
from headrace_shared.errors import BusError, QueueFull
from headrace_shared.messages import Cancel, CancelReason, Outcome, Request, RequestEnded
from headrace_shared.subjects import REQUESTS, cancel_subject, tokens_subject

log = structlog.get_logger(__name__)

GRACE_S = 0.5
"""For the scheduler to say that the request was its own."""
GIVE_UP_S = 60.0
"""Longest time to reach a broker that is away. After that the request's own end has to do."""
MAX_TASKS = 20_000
_OUTCOMES = {
    CancelReason.CLIENT: Outcome.CANCELLED,
    CancelReason.DEADLINE: Outcome.EXPIRED,
    CancelReason.SHED: Outcome.SHED,
}


class QueuedRequest(NamedTuple):
    request: Request
    stream_sequence: int | None
    """Of the queue message, if known."""
    has_started: bool
    """A scheduler has it: there have been events."""


class Canceller:
    """Does its work in the background, as the client who gave rise to it is gone."""

    def __init__(self, bus: Bus, table: InFlightTable) -> None:
        self._bus = bus
        self._table = table
        self._tasks: set[asyncio.Task[None]] = set()

    def stop_choice(self, request: Request, choice: int) -> None:
        """The choice is complete: its stop string was met."""
        cancel = Cancel(request_id=request.request_id, choice=choice, reason=CancelReason.STOP)
        self._spawn(self._publish(cancel), lambda: None)

    def abort(self, queued: QueuedRequest, reason: CancelReason) -> None:
        """Nobody waits for the request any more."""
        heard = Mailbox(capacity=64)
        unregister = self._table.register(queued.request.request_id, heard)
        self._spawn(self._abort(queued, reason, heard), unregister)

    async def close(self, timeout_s: float = 2.0) -> None:
        """Finishes what is under way, within the time."""
        if self._tasks:
            _, late = await asyncio.wait(set(self._tasks), timeout=timeout_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    def _spawn(self, work: Coroutine[Any, Any, None], finish: Callable[[], None]) -> None:
        if len(self._tasks) >= MAX_TASKS:
            work.close()
            finish()
            log.error("too many cancellations at once; this one is left to the request's own end")
            return
        task = asyncio.create_task(work, name="cancel")
        self._tasks.add(task)
        task.add_done_callback(self._on_done)
        task.add_done_callback(lambda _: finish())

    def _on_done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("cancellation failed", error=repr(error))

    async def _abort(self, queued: QueuedRequest, reason: CancelReason, heard: Mailbox) -> None:
        request = queued.request
        try:
            await self._publish(Cancel(request_id=request.request_id, reason=reason))
            if queued.has_started or queued.stream_sequence is None:
                return
            if await self._is_answered(heard):
                return
            if not await self._bus.delete(REQUESTS, queued.stream_sequence):
                return
            if await self._is_answered(heard):
                return
            ended = RequestEnded(request_id=request.request_id, outcome=_OUTCOMES[reason])
            self._bus.publish(tokens_subject(request.router, request.request_id), encode(ended))
        except BusError as error:
            # The tombstone is there; whoever pulls the request will end it.
            log.warning("queued request not deleted", request_id=request.request_id, error=str(error))
        finally:
            heard.close()

    async def _is_answered(self, heard: Mailbox) -> bool:
        """Whether the request's owner says something within the grace."""
        until = asyncio.get_running_loop().time() + GRACE_S
        while not (answers := heard.take(1)) and asyncio.get_running_loop().time() < until:
            await heard.wait(until)
        return bool(answers)

    async def _publish(self, cancel: Cancel) -> None:
        """Raises the last BusError after GIVE_UP_S."""
        subject, data = cancel_subject(cancel.request_id), encode(cancel)
        message_id = f"cancel-{cancel.request_id}-{cancel.choice}-{cancel.reason}"
        until = asyncio.get_running_loop().time() + GIVE_UP_S
        delay_s = 0.1
        while True:
            try:
                await self._bus.enqueue(subject, data, message_id=message_id)
                return
            except QueueFull:
                raise
            except BusError:
                if asyncio.get_running_loop().time() > until:
                    raise
            await asyncio.sleep(delay_s)
            delay_s = min(2.0, 2 * delay_s)
