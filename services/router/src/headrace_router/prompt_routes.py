"""What becomes of a prompt, without an answer to it: tokens of texts and chats, texts of tokens, rendered calls."""

import contextlib
from collections.abc import AsyncIterator
from typing import Protocol

from fastapi import APIRouter, Request
from starlette.responses import Response

from headrace_router.answer_schemas import Detokenized, Rendered, Tokenized
from headrace_router.authentication import identity_of
from headrace_router.bodies import Body, receive_json
from headrace_router.call_response import ClientLimits
from headrace_router.calls import Caller
from headrace_router.http_errors import json_response
from headrace_router.identity import Identity
from headrace_router.models import Models, ServedModel
from headrace_router.openapi import OF_BODIES, operation
from headrace_router.preparation import Endpoint, Prepared, Preparer
from headrace_router.rendering import rendered
from headrace_router.schemas import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from headrace_router.tokenizing import chat_to_tokenize, check_ids_known, text_tokens, tokens_of_chat


class PromptParts(Protocol):
    """What the handlers need."""

    @property
    def caller(self) -> Caller: ...

    @property
    def models(self) -> Models: ...

    @property
    def preparer(self) -> Preparer: ...

    @property
    def limits(self) -> ClientLimits: ...


def make_prompt_router(parts: PromptParts) -> APIRouter:
    router = APIRouter()

    @contextlib.asynccontextmanager
    async def asked(request: Request) -> AsyncIterator[tuple[Body, Identity]]:
        identity = identity_of(request.scope)
        with await receive_json(request.headers, request.receive, parts.limits.body) as body:
            async with parts.caller.question(identity):
                yield body, identity

    async def render(request: Request, endpoint: Endpoint) -> Response:
        async with asked(request) as (given, identity):
            parsed = await parts.preparer.parse(endpoint, given)
            identity.check_model(parsed.model)
            prepared = await parts.preparer.prepare(parsed, parts.models.get(parsed.model), 0, identity.owner)
            return await parts.preparer.in_thread(given, lambda: _shown(prepared, endpoint))

    @router.post("/v1/chat/completions/render", openapi_extra=operation(Rendered, body=ChatBody, errors=OF_BODIES))
    async def render_chat(request: Request) -> Response:
        """The prompt that a call would have, and how its answer would be drawn."""
        return await render(request, Endpoint.CHAT)

    @router.post(
        "/v1/completions/render",
        openapi_extra=operation(Rendered, body=CompletionBody, errors=OF_BODIES, is_list=True),
    )
    async def render_completion(request: Request) -> Response:
        """The prompts that a call would have, and how their answers would be drawn."""
        return await render(request, Endpoint.COMPLETION)

    @router.post("/tokenize", openapi_extra=operation(Tokenized, body=TokenizeBody, errors=OF_BODIES))
    async def tokenize(request: Request) -> Response:
        """The tokens of a text or of a chat."""
        async with asked(request) as (given, identity):
            body = await parts.preparer.read(Endpoint.CHAT, TokenizeBody, given)
            identity.check_model(body.model)
            model = parts.models.get(body.model)
            chat = chat_to_tokenize(body, model)
            if chat is None:
                find = text_tokens(body, model)
                return await parts.preparer.in_thread(given, lambda: _tokenized(body, model, find()))
            return await parts.preparer.rendered(
                model, chat, given, lambda text: _tokenized(body, model, tokens_of_chat(body, model, text))
            )

    @router.post("/detokenize", openapi_extra=operation(Detokenized, body=DetokenizeBody, errors=OF_BODIES))
    async def detokenize(request: Request) -> Response:
        """The text of tokens."""
        async with asked(request) as (given, identity):
            body = await parts.preparer.read(Endpoint.COMPLETION, DetokenizeBody, given)
            identity.check_model(body.model)
            model = parts.models.get(body.model)
            return await parts.preparer.in_thread(given, lambda: _detokenized(body, model))

    return router


def _shown(prepared: Prepared, endpoint: Endpoint) -> Response:
    """Takes its time with long prompts."""
    objects = rendered(prepared)
    return json_response(objects[0] if endpoint is Endpoint.CHAT else objects)


def _tokenized(body: TokenizeBody, model: ServedModel, ids: list[int]) -> Response:
    answer = {"count": len(ids), "max_model_len": model.card.context, "tokens": ids}
    if body.return_token_strs:
        answer["token_strs"] = model.encoder.names_of(ids)
    return json_response(answer)


def _detokenized(body: DetokenizeBody, model: ServedModel) -> Response:
    """Raises InvalidRequest."""
    check_ids_known(body, model)
    return json_response({"prompt": model.encoder.decode(body.tokens)})
