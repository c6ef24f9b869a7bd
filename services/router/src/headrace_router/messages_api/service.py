"""Anthropic's Messages API, on top of chat completions: the same calls in other words."""

import msgspec

from headrace_router.bodies import Body
from headrace_router.call import Call
from headrace_router.call_record import Dialect, Wording
from headrace_router.calls import Caller
from headrace_router.field_names import in_words_of
from headrace_router.identity import Identity
from headrace_router.messages_api.schemas import CountTokensBody, MessagesBody
from headrace_router.messages_api.translation import FIELD_NAMES, translate, translate_prompt
from headrace_router.models import Models
from headrace_router.preparation import Endpoint, Parsed, Preparer
from headrace_router.validation import CONTEXT_EXCEEDED
from headrace_shared.errors import InvalidRequest


class MessagesService:
    def __init__(self, caller: Caller, preparer: Preparer, models: Models) -> None:
        self._caller = caller
        self._preparer = preparer
        self._models = models

    async def create(self, call: Call, given: Body) -> None:
        """Raises RequestError or BusError before the first byte."""
        with in_words_of(FIELD_NAMES):
            self._caller.admit(call, is_chat=True)
            body = await self._preparer.read(Endpoint.MESSAGES, MessagesBody, given)
            try:
                await self._caller.begin(call, _parsed(body, given, limits_tokens=True), is_trial=True)
            except InvalidRequest as error:
                if error.code != CONTEXT_EXCEEDED:
                    raise
                # Clients ask for as much as their usual model can give: where less fits, the answer says so.
                await self._caller.begin(call, _parsed(body, given, limits_tokens=False))

    async def count_tokens(self, identity: Identity, given: Body) -> dict[str, int]:
        """Raises RequestError or BusError."""
        with in_words_of(FIELD_NAMES):
            async with self._caller.question(identity):
                body = await self._preparer.read(Endpoint.MESSAGES, CountTokensBody, given)
                identity.check_model(body.model)
                model = self._models.get(body.model)
                chat = translate_prompt(body)
                return {"input_tokens": await self._preparer.num_prompt_tokens(chat, given, model)}


def _parsed(body: MessagesBody, given: Body, *, limits_tokens: bool) -> Parsed:
    about = msgspec.json.encode({} if limits_tokens else {"max_tokens": body.max_tokens})
    chat = translate(body, limits_tokens=limits_tokens)
    return Parsed(Endpoint.MESSAGES, chat, given, Wording(Dialect.MESSAGES, about), made_of=(body,))
