"""New responses: each is a chat that is told in other words, and kept."""

from typing import Any

import msgspec

from headrace_router.bodies import Body
from headrace_router.call import Call
from headrace_router.call_record import Dialect, Wording
from headrace_router.calls import Caller
from headrace_router.field_names import in_words_of
from headrace_router.identity import Identity
from headrace_router.models import Models
from headrace_router.parsed_size import parsed_size
from headrace_router.preparation import Endpoint, Parsed, Preparer
from headrace_router.requests import MAX_SHORTENED
from headrace_router.responses_api.background import BackgroundResponses
from headrace_router.responses_api.conversation import num_droppable, num_excess, shortened
from headrace_router.responses_api.items import Items, items_of
from headrace_router.responses_api.keeping import ForegroundKeeper
from headrace_router.responses_api.kept_responses import KeptResponses, send_json
from headrace_router.responses_api.packing import packed
from headrace_router.responses_api.response_object import PREFIX, About
from headrace_router.responses_api.schemas import InputTokensBody, ResponsesBody
from headrace_router.responses_api.store import ResponseStore
from headrace_router.responses_api.stored import MAX_BYTES, StoredResponse
from headrace_router.responses_api.translation import FIELD_NAMES, translate, translate_prompt
from headrace_router.validation import CONTEXT_EXCEEDED
from headrace_shared.errors import Forbidden, InvalidRequest, ProtocolError

MAX_ATTEMPTS = 8
"""With one conversation: whole, then without what should not fit, and then each time with half of what may be dropped.
The last has nothing that may be."""


class ResponseCreator:
    def __init__(
        self,
        *,
        caller: Caller,
        preparer: Preparer,
        models: Models,
        store: ResponseStore,
        background: BackgroundResponses,
        kept: KeptResponses,
    ) -> None:
        self._caller = caller
        self._preparer = preparer
        self._models = models
        self._store = store
        self._background = background
        self._kept = kept

    async def create(self, call: Call, given: Body) -> None:
        """Raises RequestError or BusError before the first byte."""
        with in_words_of(FIELD_NAMES):
            self._caller.admit(call, is_chat=True)
            body = await self._preparer.read(Endpoint.RESPONSES, ResponsesBody, given)
            call.identity.check_model(body.model)
            context = await self._context(call.identity, body.previous_response_id, given)
            conversation = context + items_of(body.input, PREFIX + call.request_id, context)
            # A conversation that was stored may be longer than any body.
            items = await _packed(conversation, given.num_bytes if not context else MAX_BYTES)
            await self._begin(call, body, conversation, items, given)

    async def input_tokens(self, identity: Identity, given: Body) -> dict[str, Any]:
        """How many tokens the prompt of such a response has. Raises RequestError or BusError."""
        with in_words_of(FIELD_NAMES):
            async with self._caller.question(identity):
                body = await self._preparer.read(Endpoint.RESPONSES, InputTokensBody, given)
                identity.check_model(body.model)
                model = self._models.get(body.model)
                context = await self._context(identity, body.previous_response_id, given)
                conversation = context + items_of(body.input, PREFIX, context)
                chat = translate_prompt(body, conversation)
                num_tokens = await self._preparer.num_prompt_tokens(chat, given, model)
                return {"object": "response.input_tokens", "input_tokens": num_tokens}

    async def _context(self, identity: Identity, previous: str | None, given: Body) -> Items:
        if previous is None:
            return []
        context = await self._kept.conversation(identity, previous)
        given.add(parsed_size(context))
        return context

    async def _begin(
        self, call: Call, body: ResponsesBody, conversation: Items, items: bytes | None, given: Body
    ) -> None:
        left = conversation
        for attempt in range(MAX_ATTEMPTS):
            try:
                may_shorten = body.truncation == "auto" and num_droppable(left) > 0
                await self._begin_with(call, body, left, items, given, is_trial=may_shorten)
                return
            except InvalidRequest as error:
                most = num_droppable(left)
                if error.code != CONTEXT_EXCEEDED or not may_shorten:
                    raise
                assert attempt < MAX_ATTEMPTS - 1, "the last attempt has nothing to drop"
                if attempt == 0:
                    left = shortened(left, await self._excess(body, left, given))
                else:
                    left = shortened(left, most if attempt == MAX_ATTEMPTS - 2 else max(1, most // 2))

    async def _excess(self, body: ResponsesBody, conversation: Items, given: Body) -> int:
        """How many items at least do not fit. Counted once: each attempt tokenizes the whole conversation."""
        model = self._models.get(body.model)
        try:
            num_tokens = await self._preparer.num_prompt_tokens(translate_prompt(body, conversation), given, model)
        except InvalidRequest:  # too long to be counted
            return num_excess(conversation, 1 / MAX_SHORTENED)
        return num_excess(conversation, (model.card.context - (body.max_output_tokens or 1)) / num_tokens)

    async def _begin_with(
        self, call: Call, body: ResponsesBody, left: Items, items: bytes | None, given: Body, *, is_trial: bool
    ) -> None:
        """`left` is what the model gets of the conversation, `items` what is stored of it; None: it is too large."""
        chat, about = translate(body, left)
        if about.store and not self._has_room(items, about):
            if body.store or about.background:
                raise InvalidRequest("The response is too large to be stored.", param="store", code="payload_too_large")
            about = msgspec.structs.replace(about, store=False)
        elif about.store:
            try:
                self._store.check_share(call.identity.owner, len(items or b""))
            except Forbidden:
                if body.store or about.background:
                    raise
                about = msgspec.structs.replace(about, store=False)
        wording = Wording(Dialect.RESPONSES, msgspec.json.encode(about), by_token=about.background)
        parsed = Parsed(Endpoint.RESPONSES, chat, given, wording, made_of=(body, left))
        try:
            await self._begin_parsed(call, parsed, about, items, is_streamed=bool(body.stream), is_trial=is_trial)
        except InvalidRequest as error:
            # Repeated calls outlive the tokens of their answers; so do stored responses.
            response = await self._kept_of(call, parsed) if error.code == "answer_expired" else None
            if response is None or body.stream:
                raise
            await send_json(call, response)

    async def _kept_of(self, call: Call, parsed: Parsed) -> dict[str, Any] | None:
        repeated = await self._caller.repeated(call, parsed)
        return None if repeated is None else await self._kept.find(call.identity, repeated)

    async def _begin_parsed(
        self, call: Call, parsed: Parsed, about: About, items: bytes | None, *, is_streamed: bool, is_trial: bool
    ) -> None:
        owner = call.identity.owner
        if not about.background:
            keeper = ForegroundKeeper(self._store, owner, items) if about.store and items is not None else None
            await self._caller.begin(call._replace(keeper=keeper), parsed, is_trial=is_trial)
            return
        stored = StoredResponse(owner=owner, response=b"", items=items or b"")
        begun = await self._background.begin(call, parsed, stored, is_trial=is_trial)
        if is_streamed and begun.record is not None:
            await self._kept.follow_record(call, begun.record)
        else:
            await send_json(call, begun.response)

    def _has_room(self, items: bytes | None, about: About) -> bool:
        return items is not None and len(items) + len(msgspec.json.encode(about)) <= self._store.max_items_bytes


async def _packed(conversation: Items, num_bytes: int) -> bytes | None:
    try:
        return await packed(conversation, num_bytes)
    except ProtocolError:
        return None
