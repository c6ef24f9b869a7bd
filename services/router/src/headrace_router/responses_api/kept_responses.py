"""Responses that are stored, for those who made them."""

import contextlib
from collections.abc import Iterator
from typing import Any

import msgspec

from headrace_router.answering import Reply, StreamFailed, answer_stream
from headrace_router.call import Call
from headrace_router.call_record import CallRecord, new_choice
from headrace_router.calls import Caller
from headrace_router.identity import Identity
from headrace_router.models import Models
from headrace_router.responses_api.background import BackgroundResponses
from headrace_router.responses_api.items import Items
from headrace_router.responses_api.packing import conversation_of, input_items_of, object_of
from headrace_router.responses_api.replay import Replay
from headrace_router.responses_api.store import Found, ResponseStore, request_id_of
from headrace_router.responses_api.stored import StoredResponse, is_final, pack
from headrace_router.responses_api.writing import response_writer
from headrace_shared.bus import Bus
from headrace_shared.errors import InvalidRequest, ProtocolError, RevisionConflict, ServiceFailure
from headrace_shared.messages import RequestId
from headrace_shared.subjects import TOKENS, tokens_subject

_BACKGROUND_ONLY = "Only background responses can be {}."


class KeptResponses:
    """All of it raises InvalidRequest for what is not there, or not the caller's, and BusError."""

    def __init__(
        self,
        *,
        bus: Bus,
        caller: Caller,
        models: Models,
        store: ResponseStore,
        background: BackgroundResponses,
        ping_interval_s: float,
    ) -> None:
        self._bus = bus
        self._caller = caller
        self._models = models
        self._store = store
        self._background = background
        self._ping_interval_s = ping_interval_s

    async def retrieve(self, identity: Identity, response_id: str) -> dict[str, Any]:
        """As it is now."""
        found = await self._store.load(identity.owner, response_id)
        response, record = await _object_of(found.stored), found.stored.call
        if is_final(response) or record is None:
            return response
        (request,) = record.requests
        has_begun = await self._bus.last(TOKENS.name, tokens_subject(request.router, request.request_id)) is not None
        # Of one whose tokens are all there the end is stored in a moment.
        return {**response, "status": "in_progress" if has_begun else "queued"}

    async def follow(self, call: Call, response_id: str, starting_after: int) -> None:
        """The events of a background response behind the one with that number."""
        found = await self._store.load(call.identity.owner, response_id)
        record = found.stored.call
        if record is None:
            raise InvalidRequest(_BACKGROUND_ONLY.format("streamed again"), param="stream")
        if not is_final(await _object_of(found.stored)):
            try:
                await self.follow_record(call, record, starting_after)
                return
            except InvalidRequest:
                # It may have ended meanwhile, and its tokens been forgotten.
                found = await self._store.load(call.identity.owner, response_id)
                if not is_final(await _object_of(found.stored)):
                    raise
        await self._replay(call, found.stored, record, starting_after)

    async def follow_record(self, call: Call, record: CallRecord, starting_after: int = -1) -> None:
        form = msgspec.structs.replace(record.form, stream=True)
        await self._caller.follow(call, msgspec.structs.replace(record, form=form), starting_after)

    async def find(self, identity: Identity, request_id: RequestId) -> dict[str, Any] | None:
        """One that has ended, of the call with this id."""
        found = await self._store.find(request_id)
        if found is None or found.stored.owner != identity.owner:
            return None
        response = await _object_of(found.stored)
        return response if is_final(response) else None

    async def cancel(self, identity: Identity, response_id: str) -> dict[str, Any]:
        """The response as it is then. No error if it has ended."""
        found = await self._store.load(identity.owner, response_id)
        if found.stored.call is None:
            raise InvalidRequest(_BACKGROUND_ONLY.format("cancelled"))
        return await self._cancel(found, found.stored.call)

    async def delete(self, identity: Identity, response_id: str) -> dict[str, Any]:
        found = await self._store.load(identity.owner, response_id)
        if found.stored.call is not None:
            await self._cancel(found, found.stored.call)
        request_id = request_id_of(response_id)
        assert request_id is not None, response_id
        await self._store.delete(request_id)
        return {"id": response_id, "object": "response", "deleted": True}

    async def input_items(self, identity: Identity, response_id: str) -> Items:
        """The conversation that it answers."""
        found = await self._store.load(identity.owner, response_id)
        with _readable():
            return await input_items_of(found.stored)

    async def conversation(self, identity: Identity, previous: str) -> Items:
        """What a response that continues this one knows already."""
        found = await self._store.load(identity.owner, previous, param="previous_response_id")
        if not is_final(await _object_of(found.stored)):
            raise InvalidRequest(
                "The previous response has not ended yet.",
                param="previous_response_id",
                code="previous_response_not_finished",
            )
        with _readable():
            return await conversation_of(found.stored)

    async def _cancel(self, found: Found, record: CallRecord) -> dict[str, Any]:
        response = await _object_of(found.stored)
        if is_final(response):
            return response
        self._background.cancel(record)
        response = {**response, "status": "cancelled"}
        cancelled = msgspec.structs.replace(found.stored, response=pack(response))
        try:
            await self._store.update(record.request_id, cancelled, found.revision)
        except RevisionConflict:
            # It has ended just now: that is what it is.
            return await _object_of((await self._store.load(found.stored.owner, response["id"])).stored)
        return response

    async def _replay(self, call: Call, stored: StoredResponse, record: CallRecord, starting_after: int) -> None:
        response = await _object_of(stored)
        if response["output"] and not stored.answer:
            raise InvalidRequest("The events are not kept any more; the response is.", code="answer_expired")
        (request,) = record.requests
        model = self._models.asked_by(request)
        ended_at = response["completed_at"] or record.created
        writer = response_writer(request, record.form, record.created, model, starting_after, lambda: ended_at)
        reply = Reply(
            request_id=request.request_id,
            shown_id=call.shown_id,
            send=call.send,
            writer=writer,
            num_choices=1,
            on_token=lambda: None,
            ping_interval_s=self._ping_interval_s,
        )
        call.meter.hand_over()
        choice = new_choice(record.form, request.stop, model)
        with contextlib.suppress(StreamFailed):  # the client has been told
            await answer_stream(reply, Replay(stored.answer, choice, response))


async def send_json(call: Call, content: dict[str, Any]) -> None:
    body = msgspec.json.encode(content)
    headers = {"content-type": "application/json", "content-length": str(len(body)), "x-request-id": call.shown_id}
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await call.send({"type": "http.response.start", "status": 200, "headers": raw})
    await call.send({"type": "http.response.body", "body": body, "more_body": False})


async def _object_of(stored: StoredResponse) -> dict[str, Any]:
    with _readable():
        return await object_of(stored)


@contextlib.contextmanager
def _readable() -> Iterator[None]:
    try:
        yield
    except ProtocolError as error:
        raise ServiceFailure("The stored response cannot be read.", code="response_unreadable") from error
