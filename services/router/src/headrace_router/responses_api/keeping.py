"""Stores the answers of responses."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import structlog

from headrace_router.call_record import CallRecord
from headrace_router.responses_api.packing import packed
from headrace_router.responses_api.response_object import about_of, error_of, facts_of, response_object
from headrace_router.responses_api.store import ResponseStore, request_id_of
from headrace_router.responses_api.stored import StoredResponse, is_final, pack
from headrace_router.submission import read_events
from headrace_router.token_log import Cursor
from headrace_shared.bus import Bus
from headrace_shared.errors import (
    BusError,
    InvalidRequest,
    Overloaded,
    PayloadTooLarge,
    ProtocolError,
    QueueFull,
    RequestError,
    RevisionConflict,
    ServiceFailure,
)
from headrace_shared.messages import RequestId, TokenFrame

log = structlog.get_logger(__name__)

STORE_FULL_S = 60.0
"""Room comes only as old responses go."""
_TOO_LARGE = ServiceFailure("The response is too large to be stored.", code="response_too_large")


class ForegroundKeeper:
    """Implements `call.Keeper`: the response is stored when it has ended."""

    def __init__(self, store: ResponseStore, owner: str, items: bytes) -> None:
        """`items`: the conversation, packed."""
        self._store = store
        self._owner = owner
        self._items = items

    async def queued(self, record: CallRecord) -> None:
        return

    async def answered(self, answer: bytes) -> None:
        response = msgspec.json.decode(answer)
        request_id = request_id_of(response["id"])
        assert request_id is not None, response["id"]
        try:
            stored = StoredResponse(owner=self._owner, response=await packed(response, len(answer)), items=self._items)
            await self._store.put(request_id, stored)
        except (BusError, ProtocolError) as error:
            log.warning("response not stored", request_id=request_id, error=str(error))


class BackgroundKeeper:
    """Implements `call.Keeper`: the response is stored at its beginning and at its end."""

    def __init__(
        self,
        store: ResponseStore,
        bus: Bus,
        router: str,
        stored: StoredResponse,
        revision: int | None = None,
        on_queued: Callable[[RequestId], None] | None = None,
    ) -> None:
        """`stored`: without its call and object, which come as it begins; with `revision` it has begun. `on_queued`
        hears its id before anybody else can."""
        self._store = store
        self._bus = bus
        self._router = router
        self._stored = stored
        self._revision = revision
        self._on_queued = on_queued
        self.record = stored.call
        self.has_begun = asyncio.Event()

    async def queued(self, record: CallRecord) -> None:
        if self.record is not None:
            return
        facts = facts_of(record.requests[0], record.created)
        response = response_object(about_of(record.form), facts, "queued", [])
        self._stored = msgspec.structs.replace(self._stored, response=pack(response), call=record)
        if self._on_queued is not None:
            self._on_queued(record.request_id)
        # In this order: whoever finds it on the list and nowhere else takes it off.
        await self._store.add_unfinished(record.request_id, self._router)
        try:
            self._revision = await self._store.create(record.request_id, self._stored)
        except RevisionConflict:
            # The same request was made again, with the same idempotency key.
            found = await self._store.find(record.request_id)
            if found is None:
                raise InvalidRequest("The response was deleted.", code="answer_expired") from None
            self._stored, self._revision = found
        except QueueFull as error:
            raise Overloaded(
                "There is no room for more stored responses.", retry_after_s=STORE_FULL_S, code="response_store_full"
            ) from error
        self.record = record
        self.has_begun.set()

    @property
    def response(self) -> dict[str, Any]:
        return self._stored.object

    async def answered(self, answer: bytes) -> None:
        try:
            await self._end(msgspec.json.decode(answer), len(answer))
        except (BusError, ProtocolError) as error:
            log.warning("background response not stored", error=str(error))

    async def failed(self, error: RequestError) -> None:
        """Raises BusError."""
        if error.code == "cancelled":
            await self._end({**self.response, "status": "cancelled"})
        else:
            await self._end({**self.response, "status": "failed", "error": error_of(error)})

    async def _end(self, response: dict[str, Any], num_bytes: int = 0) -> None:
        record = self.record
        assert record is not None and self._revision is not None, "ends before it has begun"
        if not is_final(self.response):
            answer = await answer_of(self._bus, record)
            response_bytes = await packed(response, num_bytes)
            ended = msgspec.structs.replace(self._stored, response=response_bytes, answer=answer)
            too_large = {**self.response, "status": "failed", "error": error_of(_TOO_LARGE)}
            # Rather without the tokens than not at all; and an end it gets in any case.
            for stored in (
                ended,
                msgspec.structs.replace(ended, answer=()),
                msgspec.structs.replace(ended, answer=(), response=pack(too_large)),
            ):
                try:
                    self._revision = await self._store.update(record.request_id, stored, self._revision)
                    break
                except RevisionConflict:
                    log.info("response ended otherwise meanwhile", request_id=record.request_id)
                    break
                except (PayloadTooLarge, ProtocolError) as error:  # of the broker, or of any message
                    log.warning("response too large to be stored", request_id=record.request_id, error=str(error))
        await self._store.remove_unfinished(record.request_id)


async def answer_of(bus: Bus, record: CallRecord) -> tuple[TokenFrame, ...]:
    """What the token log holds of the call's only choice, without repetitions. Raises BusError."""
    (request,) = record.requests
    frames = [logged.event for logged in await read_events(bus, request) if isinstance(logged.event, TokenFrame)]
    return tuple(Cursor().repair([frame for frame in frames if frame.choice == 0]))
