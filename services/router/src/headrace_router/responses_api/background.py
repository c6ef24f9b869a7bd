"""Background responses: each is read to its end by a router, which stores it.

Who reads which is written down in the bucket UNFINISHED. What a dead router has left is taken over by the others; the
tokens are in the token log meanwhile.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

import structlog
from starlette.types import Message

from headrace_router.accounts import Charge
from headrace_router.call import Call, new_request_id
from headrace_router.call_meter import CallMeter
from headrace_router.call_record import CallRecord
from headrace_router.calls import Caller
from headrace_router.cancellation import Canceller, QueuedRequest
from headrace_router.http_errors import to_request_error
from headrace_router.identity import Identity
from headrace_router.metrics import RouterMetrics
from headrace_router.preparation import Parsed
from headrace_router.presence import Presence
from headrace_router.responses_api.keeping import BackgroundKeeper
from headrace_router.responses_api.packing import object_of
from headrace_router.responses_api.store import Found, ResponseStore
from headrace_router.responses_api.stored import StoredResponse, Unfinished, is_final
from headrace_shared.beats import beat
from headrace_shared.bus import Bus, Entry
from headrace_shared.codec import decode
from headrace_shared.errors import (
    BusError,
    ModelNotFound,
    Overloaded,
    ProtocolError,
    RequestError,
    RevisionConflict,
    ServiceFailure,
)
from headrace_shared.messages import CancelReason, RequestId
from headrace_shared.subjects import TOKEN_LOG_S
from headrace_shared.trace_context import TraceContext, new_trace

log = structlog.get_logger(__name__)

MAX_CALLS = 1000
"""That one router reads at a time."""
PERIOD_S = 1.0
RETRY_S = 5.0
"""For what could not be read, because the broker was away, say."""
HAND_OVER_S = 1.0
"""To tell the others what is left to them."""
NOBODY = ""
_NOT_THE_END = frozenset({"draining", "unavailable"})
"""Codes of failures that are this router's own."""


class BackgroundResponses:
    """`run` is its task."""

    def __init__(
        self,
        *,
        bus: Bus,
        router: str,
        caller: Caller,
        canceller: Canceller,
        store: ResponseStore,
        presence: Presence,
        metrics: RouterMetrics,
    ) -> None:
        self._bus = bus
        self._router = router
        self._caller = caller
        self._canceller = canceller
        self._store = store
        self._presence = presence
        self._metrics = metrics
        self._tasks: dict[RequestId, asyncio.Task[None]] = {}
        self._unfinished: dict[RequestId, Unfinished] = {}
        self._revisions: dict[RequestId, int] = {}
        self._retry_at: dict[RequestId, float] = {}
        self._is_leaving = False

    def on_unfinished(self, entry: Entry | None, key: str) -> None:
        """Of the bucket UNFINISHED."""
        request_id = RequestId(key)
        if entry is None:
            for table in (self._unfinished, self._revisions, self._retry_at):
                table.pop(request_id, None)
            return
        try:
            self._unfinished[request_id] = decode(entry.value, Unfinished)
            self._revisions[request_id] = entry.revision
        except ProtocolError as error:
            log.warning("undecodable entry of an unfinished response", request_id=key, error=str(error))

    async def begin(self, call: Call, parsed: Parsed, stored: StoredResponse, *, is_trial: bool) -> BackgroundKeeper:
        """Returns when the response is queued and stored. Raises RequestError or BusError if it is not."""
        if len(self._tasks) >= MAX_CALLS:
            raise Overloaded("There are too many background responses.", retry_after_s=10.0)
        claim = partial(self._claim, call.request_id)
        keeper = BackgroundKeeper(self._store, self._bus, self._router, stored, on_queued=claim)
        own = _own_call(call, self._metrics)._replace(keeper=keeper)
        work = self._spawn(
            call.request_id,
            self._watched(keeper, partial(self._caller.begin, own, parsed, is_trial=is_trial), own.meter),
        )
        begun = asyncio.ensure_future(keeper.has_begun.wait())
        try:
            await asyncio.wait((work, begun), return_when=asyncio.FIRST_COMPLETED)
        finally:
            begun.cancel()
            if not keeper.has_begun.is_set():
                work.cancel()
        if not keeper.has_begun.is_set():
            await work
            raise AssertionError("a background response ended before it began")
        return keeper

    def cancel(self, record: CallRecord) -> None:
        for request in record.requests:
            self._canceller.abort(QueuedRequest(request, None, has_started=True), CancelReason.CLIENT)

    async def run(self) -> None:
        """Takes over what nobody reads, until cancelled."""
        while not self._is_leaving:
            await beat(PERIOD_S)
            now = time.monotonic()
            for request_id, unfinished in list(self._unfinished.items()):
                if len(self._tasks) >= MAX_CALLS or self._is_leaving:
                    break
                is_read = request_id in self._tasks or (
                    unfinished.router not in (self._router, NOBODY) and self._presence.is_alive(unfinished.router)
                )
                if not is_read and self._retry_at.get(request_id, 0.0) <= now:
                    self._retry_at[request_id] = now + RETRY_S
                    self._spawn(request_id, self._adopt(request_id, unfinished))

    async def close(self) -> None:
        """What is unfinished is left to others."""
        self._is_leaving = True
        left = dict(self._tasks)
        for task in left.values():
            task.cancel()
        await asyncio.gather(*left.values(), return_exceptions=True)
        await self._hand_over(*left)

    async def _hand_over(self, *request_ids: RequestId) -> None:
        """Others need not wait until they miss this router."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HAND_OVER_S):
                given = (self._store.add_unfinished(request_id, NOBODY) for request_id in request_ids)
                await asyncio.gather(*given, return_exceptions=True)

    def _spawn(self, request_id: RequestId, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(work, name="background-response")
        self._tasks[request_id] = task
        task.add_done_callback(partial(self._on_done, request_id))
        return task

    def _claim(self, own_id: RequestId, request_id: RequestId) -> None:
        """Of the current task, begun as `own_id`: it reads that response, which an earlier call with its idempotency
        key began."""
        if request_id not in self._tasks:
            task = self._tasks[request_id] = self._tasks.pop(own_id)
            task.add_done_callback(partial(self._on_done, request_id))

    def _on_done(self, request_id: RequestId, task: "asyncio.Task[None]") -> None:
        if self._tasks.get(request_id) is not task:
            return
        del self._tasks[request_id]
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, RequestError | BusError):  # those are told to the client
            log.error("background response failed", request_id=request_id, error=repr(error))

    async def _adopt(self, request_id: RequestId, unfinished: Unfinished) -> None:
        revision = self._revisions.get(request_id)
        if revision is None:
            return
        try:
            if unfinished.router != self._router:
                await self._store.take_over(request_id, self._router, revision)
                log.info("takes over a background response", request_id=request_id, router=unfinished.router)
            found = await self._store.find_surely(request_id)
            if found is None or found.stored.call is None or is_final(await object_of(found.stored)):
                await self._store.remove_unfinished(request_id)
                self.on_unfinished(None, request_id)
                return
            await self._read(found, found.stored.call)
        except RevisionConflict:
            # Another router was quicker; or the end was not heard of.
            with contextlib.suppress(BusError):
                self.on_unfinished(await self._store.unfinished(request_id), request_id)
        except (BusError, ProtocolError) as error:
            log.warning("unfinished response not read", request_id=request_id, error=str(error))

    async def _read(self, found: Found, record: CallRecord) -> None:
        keeper = BackgroundKeeper(self._store, self._bus, self._router, found.stored, found.revision)
        (request,) = record.requests
        try:
            self._caller.check_readable(record)
        except RequestError as error:
            if time.time() - record.created > request.timeout_s + TOKEN_LOG_S:
                # Whatever the reason was that nobody could read it: now nobody can.
                await keeper.failed(ServiceFailure("The answer was lost.", code="answer_expired"))
                return
            log.info("background response left to be read later", request_id=record.request_id, reason=str(error))
            return
        call = Call(
            new_request_id(),
            record.request_id,
            {},
            _nowhere,
            time.monotonic(),
            Identity(found.stored.owner),
            Charge(),
            CallMeter(self._metrics, time.monotonic()),
            new_trace(),
            keeper=keeper,
        )
        await self._watched(keeper, partial(self._caller.follow, call, record), call.meter)

    async def _watched(self, keeper: BackgroundKeeper, work: Callable[[], Awaitable[None]], meter: CallMeter) -> None:
        """Raises only what went wrong before the response began."""
        told: RequestError | None = None
        try:
            await work()
        except (RequestError, BusError) as error:
            told = to_request_error(error)
            if keeper.record is None:
                raise
            if isinstance(error, BusError | ModelNotFound) or told.code in _NOT_THE_END:
                log.info("background response left to be read later", code=told.code)
                if told.code == "draining":
                    self._is_leaving = True
                    await self._hand_over(keeper.record.request_id)
                return
            self.cancel(keeper.record)
            try:
                await keeper.failed(told)
            except (BusError, ProtocolError) as problem:
                log.warning("end of a background response not stored", error=str(problem))
        finally:
            meter.close(told)


def _own_call(call: Call, metrics: RouterMetrics) -> Call:
    """The same without its client."""
    meter = CallMeter(metrics, call.arrived_at)
    meter.operation = call.meter.operation
    call.meter.hand_over()
    context: TraceContext = call.trace.context if call.trace is not None else call.context
    return call._replace(send=_nowhere, charge=Charge(), meter=meter, context=context, trace=None)


async def _nowhere(message: Message) -> None:
    return
