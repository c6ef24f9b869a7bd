"""A body to a valid, tokenized call."""

from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

import structlog

from headrace_router.call_record import AnswerForm, form_of
from headrace_router.models import Models, ServedModel
from headrace_router.parsing import parse_body
from headrace_router.requests import EncodedPrompt, encode_chat, encode_prompts
from headrace_router.schemas import ChatBody, CompletionBody, GenerationBody
from headrace_router.tokenization import PromptPool
from headrace_router.unsupported import unknown_fields
from headrace_router.validation import ValidParams, validate_chat, validate_completion

log = structlog.get_logger(__name__)

MAX_UNKNOWN_FIELDS = 1000
"""Names of unknown fields that are remembered, so that each is logged once."""


class Endpoint(Enum):
    CHAT = "chat"
    COMPLETION = "completion"


class Prepared(NamedTuple):
    model: ServedModel
    params: ValidParams
    form: AnswerForm
    encoded: list[EncodedPrompt]


class Preparer:
    def __init__(self, models: Models, pool: PromptPool) -> None:
        self._models = models
        self._pool = pool
        self._unknown_fields: set[str] = set()

    async def prepare(self, endpoint: Endpoint, data: bytes, random_seed: int) -> Prepared:
        """`random_seed` is used if the client gives none. Raises RequestError."""
        encode: Callable[[], list[EncodedPrompt]]
        if endpoint is Endpoint.CHAT:
            chat_body = parse_body(ChatBody, data)
            model = self._models.get(chat_body.model)
            chat, params = validate_chat(chat_body, model.card, random_seed)
            self._note_unknown(chat_body)

            def encode() -> list[EncodedPrompt]:
                return encode_chat(model, chat, params)
        else:
            body = parse_body(CompletionBody, data)
            model = self._models.get(body.model)
            prompts, params = validate_completion(body, model.card, random_seed)
            self._note_unknown(body)

            def encode() -> list[EncodedPrompt]:
                return encode_prompts(model, prompts, params)

        form = form_of(params, is_chat=endpoint is Endpoint.CHAT)
        return Prepared(model, params, form, await self._pool.run(encode))

    def _note_unknown(self, body: GenerationBody) -> None:
        for name in unknown_fields(body.model_extra or {}):
            if name not in self._unknown_fields and len(self._unknown_fields) < MAX_UNKNOWN_FIELDS:
                self._unknown_fields.add(name)
                log.warning("unknown request field", field=name[:64])
