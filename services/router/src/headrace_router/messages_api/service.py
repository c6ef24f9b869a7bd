"""Anthropic's Messages API, on top of chat completions: the same calls in other words."""

import contextlib
from collections.abc import Iterator

import msgspec

from headrace_router.call import Call
from headrace_router.call_record import Dialect, Wording
from headrace_router.calls import Caller
from headrace_router.field_names import renamed
from headrace_router.identity import Identity
from headrace_router.messages_api.schemas import CountTokensBody, MessagesBody
from headrace_router.messages_api.translation import FIELD_NAMES, translate, translate_prompt
from headrace_router.models import Models
from headrace_router.parsing import parse_body
from headrace_router.preparation import Endpoint, Parsed, Preparer
from headrace_shared.errors import InvalidRequest


class MessagesService:
    def __init__(self, caller: Caller, preparer: Preparer, models: Models) -> None:
        self._caller = caller
        self._preparer = preparer
        self._models = models

    async def create(self, call: Call, data: bytes) -> None:
        """Raises RequestError or BusError before the first byte."""
        with _own_words():
            self._caller.admit(call, is_chat=True)
            body = parse_body(MessagesBody, data)
            try:
                await self._caller.begin(call, _parsed(body, data, limits_tokens=True))
            except InvalidRequest as error:
                if error.code != "context_length_exceeded":
                    raise
                # Clients ask for as much as their usual model can give: where less fits, the answer says so.
                await self._caller.begin(call, _parsed(body, data, limits_tokens=False))

    async def count_tokens(self, identity: Identity, data: bytes) -> dict[str, int]:
        """Raises RequestError or BusError."""
        with _own_words():
            async with self._caller.question(identity):
                body = parse_body(CountTokensBody, data)
                identity.check_model(body.model)
                model = self._models.get(body.model)
                chat = translate_prompt(body)
                return {"input_tokens": await self._preparer.num_prompt_tokens(chat, data, model)}


def _parsed(body: MessagesBody, data: bytes, *, limits_tokens: bool) -> Parsed:
    about = msgspec.json.encode({} if limits_tokens else {"max_tokens": body.max_tokens})
    chat = translate(body, limits_tokens=limits_tokens)
    return Parsed(Endpoint.MESSAGES, chat, data, Wording(Dialect.MESSAGES, about))


@contextlib.contextmanager
def _own_words() -> Iterator[None]:
    try:
        yield
    except InvalidRequest as error:
        raise renamed(error, FIELD_NAMES) from error
