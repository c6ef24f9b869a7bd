"""A body to a valid, tokenized call."""

from enum import Enum
from typing import NamedTuple

import msgspec
import structlog

from headrace_router.call_record import AnswerForm, Dialect, Wording, form_of
from headrace_router.embeddings import encode_inputs, parse_embedding, validate_embedding
from headrace_router.grammar_checks import GrammarChecks
from headrace_router.models import ServedModel
from headrace_router.parsing import parse_body
from headrace_router.prompt_size import PromptSize, size_of
from headrace_router.requests import (
    EncodedPrompt,
    chat_message,
    check_chat_length,
    encode_bad_words,
    encode_chat,
    encode_prompts,
)
from headrace_router.schemas import ChatBody, CompletionBody, GenerationBody
from headrace_router.template_pool import TemplatePool
from headrace_router.tokenization import PromptPool
from headrace_router.unsupported import unknown_fields
from headrace_router.valid_chat import ValidChat
from headrace_router.validation import ValidParams, validate_chat, validate_completion

log = structlog.get_logger(__name__)

MAX_UNKNOWN_FIELDS = 1000
"""Names of unknown fields that are remembered, so that each is logged once."""
MAX_INLINE_BYTES = 32 * 1024
"""Larger bodies are prepared for their template in a thread: that takes longer than going there."""


class Endpoint(Enum):
    CHAT = "chat"
    COMPLETION = "completion"
    RESPONSES = "responses"
    MESSAGES = "messages"
    EMBEDDING = "embedding"


class Parsed(NamedTuple):
    """A body whose types are right; its values are not checked yet, and nothing is tokenized."""

    endpoint: Endpoint
    body: ChatBody | CompletionBody
    data: bytes
    """As it came."""
    wording: Wording = Wording()

    @property
    def model(self) -> str:
        """As the client asks for it."""
        return self.body.model

    @property
    def size(self) -> PromptSize:
        return size_of(self.body)


class Prepared(NamedTuple):
    model: ServedModel
    params: ValidParams
    form: AnswerForm
    encoded: list[EncodedPrompt]


class Preparer:
    def __init__(self, pool: PromptPool, templates: TemplatePool, grammars: GrammarChecks) -> None:
        self._pool = pool
        self._templates = templates
        self._grammars = grammars
        self._unknown_fields: set[str] = set()

    def parse(self, endpoint: Endpoint, data: bytes) -> Parsed:
        """Raises InvalidRequest."""
        if endpoint is Endpoint.CHAT:
            return Parsed(endpoint, parse_body(ChatBody, data), data)
        if endpoint is Endpoint.EMBEDDING:
            parsed, form = parse_embedding(data)
            return Parsed(endpoint, parsed, data, Wording(Dialect.EMBEDDINGS, msgspec.json.encode(form)))
        return Parsed(endpoint, parse_body(CompletionBody, data), data)

    async def prepare(self, parsed: Parsed, model: ServedModel, random_seed: int, owner: str) -> Prepared:
        """`random_seed` is used if the client gives none. `owner`: whoever calls. Raises RequestError."""
        body = parsed.body
        if isinstance(body, ChatBody):
            chat, params = validate_chat(body, model.card, random_seed)
            encoded = await self._encode_chat(model, chat, params, is_large=len(parsed.data) > MAX_INLINE_BYTES)
        elif parsed.wording.dialect is Dialect.EMBEDDINGS:
            inputs, params = validate_embedding(body, model.card)
            encoded = await self._pool.run(lambda: encode_inputs(model, inputs, params))
        else:
            prompts, params = validate_completion(body, model.card, random_seed)
            encoded = await self._pool.run(lambda: encode_prompts(model, prompts, params))
        self._note_unknown(body)
        form = form_of(params, parsed.wording, is_chat=isinstance(body, ChatBody))
        if params.bad_words:
            words = await self._pool.run(lambda: encode_bad_words(model, params))
            params = params._replace(sampling=msgspec.structs.replace(params.sampling, bad_words=words))
        if params.echo:
            form = msgspec.structs.replace(form, echoes=tuple(prompt.text for prompt in encoded))
        if params.form is not None:
            grammar = await self._grammars.check(model.card, params.form, owner)
            params = params._replace(sampling=msgspec.structs.replace(params.sampling, grammar=grammar))
        return Prepared(model, params, form, encoded)

    async def num_prompt_tokens(self, body: ChatBody, data: bytes, model: ServedModel) -> int:
        """Of a chat without an answer; also of one that does not fit, unless by far. Raises RequestError."""
        chat, _ = validate_chat(body, model.card, 0)
        self._note_unknown(body)
        check_chat_length(model, chat, None, shortens=True)
        text = await self.render(model, chat, is_large=len(data) > MAX_INLINE_BYTES)
        return await self._pool.run(lambda: len(model.encoder.chat.ids(text)))

    async def render(self, model: ServedModel, chat: ValidChat, *, is_large: bool = True) -> bytes:
        """As the model's template has it (`ChatEncoder.ids`). Raises InvalidRequest, or Overloaded."""
        message = await self._pool.run(lambda: chat_message(model, chat)) if is_large else chat_message(model, chat)
        encoder = model.encoder.chat
        return await self._templates.render(encoder.spec, encoder.places, message)

    async def _encode_chat(
        self, model: ServedModel, chat: ValidChat, params: ValidParams, *, is_large: bool
    ) -> list[EncodedPrompt]:
        check_chat_length(model, chat, params.max_tokens, shortens=params.truncate_to is not None)
        text = await self.render(model, chat, is_large=is_large)
        return await self._pool.run(lambda: encode_chat(model, chat, text, params))

    def _note_unknown(self, body: GenerationBody) -> None:
        for name in unknown_fields(body.model_extra or {}):
            if name not in self._unknown_fields and len(self._unknown_fields) < MAX_UNKNOWN_FIELDS:
                self._unknown_fields.add(name)
                log.warning("unknown request field", field=ascii(name[:64])[1:-1])  # no lines of its own
