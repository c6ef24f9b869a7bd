"""A body to a valid, tokenized call."""

import asyncio
import contextlib
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeVar

import msgspec
import structlog
from pydantic import BaseModel

from headrace_router.bodies import Body
from headrace_router.call_record import AnswerForm, Dialect, Wording, form_of
from headrace_router.embeddings import as_completion, encode_inputs, validate_embedding
from headrace_router.grammar_checks import GrammarChecks
from headrace_router.models import ServedModel
from headrace_router.parsing import parse_body, parse_long_body
from headrace_router.prompt_size import PromptSize, size_of
from headrace_router.requests import (
    EncodedPrompt,
    chat_message,
    check_chat_length,
    count_ids,
    encode_bad_words,
    encode_chat,
    encode_prompts,
)
from headrace_router.schemas import ChatBody, CompletionBody, EmbeddingBody, GenerationBody
from headrace_router.template_pool import TemplatePool
from headrace_router.tokenization import PromptPool
from headrace_router.unsupported import unknown_fields
from headrace_router.valid_chat import ValidChat
from headrace_router.validation import ValidParams, validate_chat, validate_completion

log = structlog.get_logger(__name__)

T = TypeVar("T")
B = TypeVar("B", bound=BaseModel)

MAX_UNKNOWN_FIELDS = 1000
"""Names of unknown fields that are remembered, so that each is logged once."""
MAX_NOTED_FIELDS = 16
"""Of one body: each is a line in the log."""
MAX_INLINE_BYTES = 32 * 1024
"""Larger bodies are prepared for their template, or their token ids packed, in a thread: that takes longer than going
there."""
MAX_SHORT_BYTES = 128 * 1024
"""Larger bodies are read and tokenized one after the other, in a thread of their own."""
MAX_KEPT_CHARS = 1024
OPENAI_WORDING = Wording()


class Endpoint(Enum):
    CHAT = "chat"
    COMPLETION = "completion"
    RESPONSES = "responses"
    MESSAGES = "messages"
    EMBEDDING = "embedding"


@dataclass(frozen=True)
class Parsed:
    """A body whose types are right; its values are not checked yet, and nothing is tokenized."""

    endpoint: Endpoint
    body: ChatBody | CompletionBody
    given: Body
    """It was read."""
    wording: Wording = OPENAI_WORDING
    made_of: tuple[BaseModel | list[Any], ...] = ()
    """What `body` is a translation of."""

    @property
    def model(self) -> str:
        """As the client asks for it."""
        return self.body.model

    @cached_property
    def size(self) -> PromptSize:
        return size_of(self.body)

    def forget(self) -> None:
        """Its prompt is tokens now; whoever waits for the answer would keep all that it came as until the end. Short
        values stay."""
        if self.given.is_part:
            return
        _ = self.size
        for whole in (self.body, *self.made_of):
            if isinstance(whole, list):
                whole.clear()
                continue
            for values in (vars(whole), whole.model_extra or {}):
                values.update(dict.fromkeys([name for name, value in values.items() if _is_large(value)]))


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
        self._turn_of_long = asyncio.Lock()
        """Of chats between their messages and their tokens, where they are long."""

    async def parse(self, endpoint: Endpoint, given: Body) -> Parsed:
        """Raises InvalidRequest or Overloaded."""
        if endpoint is Endpoint.CHAT:
            return Parsed(endpoint, await self.read(endpoint, ChatBody, given), given)
        if endpoint is Endpoint.EMBEDDING:
            parsed, form = as_completion(await self.read(endpoint, EmbeddingBody, given))
            return Parsed(endpoint, parsed, given, Wording(Dialect.EMBEDDINGS, msgspec.json.encode(form)))
        return Parsed(endpoint, await self.read(endpoint, CompletionBody, given), given)

    async def read(self, endpoint: Endpoint, kind: type[B], given: Body) -> B:
        """The bytes are not needed any more then. Raises InvalidRequest or Overloaded."""
        if not _is_long(given):
            parsed = parse_body(kind, given.data)
            given.was_read(_digest(endpoint, given.data), given.num_bytes)
            return parsed

        def read() -> tuple[B, int, bytes]:
            return (*parse_long_body(kind, given.data), _digest(endpoint, given.data))

        parsed, num_bytes, digest = await self._pool.run(read, is_long=True)
        given.was_read(digest, num_bytes)
        return parsed

    async def in_thread(self, given: Body, work: Callable[[], T]) -> T:
        """Work on what was made of this body. Raises what it does, or Overloaded."""
        return await self._pool.run(work, is_long=_is_long(given))

    async def apart_if_long(self, given: Body, work: Callable[[], T]) -> T:
        """The same, but here if the body is short. Raises what it does, or Overloaded."""
        return await self.in_thread(given, work) if _is_long(given) else work()

    async def prepare(self, parsed: Parsed, model: ServedModel, random_seed: int, owner: str) -> Prepared:
        """`random_seed` is used if the client gives none. `owner`: whoever calls. Raises RequestError."""
        body, given = parsed.body, parsed.given
        if isinstance(body, ChatBody):
            validate = partial(validate_chat, body, model.card, random_seed)
            chat, params = await self.apart_if_long(given, validate)
            encoded = await self._encode_chat(model, chat, params, given)
        elif parsed.wording.dialect is Dialect.EMBEDDINGS:
            inputs, params = await self.apart_if_long(given, partial(validate_embedding, body, model.card))
            encoded = await self.in_thread(given, lambda: encode_inputs(model, inputs, params))
        else:
            validate_texts = partial(validate_completion, body, model.card, random_seed)
            prompts, params = await self.apart_if_long(given, validate_texts)
            encode = partial(encode_prompts, model, prompts, params)
            # Token ids need no tokenizing: to pack a few takes less than the way to a thread and back.
            is_quick = given.num_bytes <= MAX_INLINE_BYTES and not isinstance(prompts[0], str)
            encoded = encode() if is_quick else await self.in_thread(given, encode)
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
        given.is_tokens(sum(len(prompt.ids) + len(prompt.text) for prompt in encoded))
        return Prepared(model, params, form, encoded)

    async def num_prompt_tokens(self, body: ChatBody, given: Body, model: ServedModel) -> int:
        """Of a chat without an answer; also of one that does not fit, unless by far. Raises RequestError."""
        chat, _ = await self.apart_if_long(given, partial(validate_chat, body, model.card, 0))
        self._note_unknown(body)
        await self.apart_if_long(given, partial(check_chat_length, model, chat, None, shortens=True))
        encode = model.encoder.chat.ids
        return await self.rendered(
            model, chat, given, lambda text: len(count_ids(encode, text.decode(), model, "messages"))
        )

    async def rendered(self, model: ServedModel, chat: ValidChat, given: Body, work: Callable[[bytes], T]) -> T:
        """What `work` makes, in a thread, of the chat as the model's template has it (`ChatEncoder.ids`). Raises
        InvalidRequest, or Overloaded."""
        write = partial(chat_message, model, chat)
        encoder = model.encoder.chat
        async with self._turn_of_long if _is_long(given) else contextlib.nullcontext():
            message = write() if given.num_bytes <= MAX_INLINE_BYTES else await self.in_thread(given, write)
            text = await self._templates.render(encoder.spec, encoder.places, message)
            return await self.in_thread(given, lambda: work(text))

    async def _encode_chat(
        self, model: ServedModel, chat: ValidChat, params: ValidParams, given: Body
    ) -> list[EncodedPrompt]:
        shortens = params.truncate_to is not None
        await self.apart_if_long(given, partial(check_chat_length, model, chat, params.max_tokens, shortens=shortens))
        return await self.rendered(model, chat, given, lambda text: encode_chat(model, chat, text, params))

    def _note_unknown(self, body: GenerationBody) -> None:
        for name in unknown_fields(body.model_extra or {})[:MAX_NOTED_FIELDS]:
            if name not in self._unknown_fields and len(self._unknown_fields) < MAX_UNKNOWN_FIELDS:
                self._unknown_fields.add(name)
                log.warning("unknown request field", field=ascii(name[:64])[1:-1])  # no lines of its own


def _digest(endpoint: Endpoint, data: bytes) -> bytes:
    digest = hashlib.sha256(f"{endpoint.value}\0".encode())
    digest.update(data)
    return digest.digest()


def _is_long(given: Body) -> bool:
    return given.num_bytes > MAX_SHORT_BYTES


def _is_large(value: Any) -> bool:
    return len(value) > MAX_KEPT_CHARS if isinstance(value, str) else isinstance(value, list | dict | BaseModel)
