"""Paths of Anthropic's Messages API to handlers. No logic."""

from collections.abc import Awaitable, Callable

from fastapi import APIRouter, Request
from starlette.responses import Response

from headrace_router.authentication import identity_of
from headrace_router.bodies import Body
from headrace_router.call_options import HEADERS, LAST_EVENT_ID, RESUMABLE
from headrace_router.call_response import Answer
from headrace_router.http_errors import json_response
from headrace_router.messages_api.answer_schemas import MessageError, MessageObject, TokenCount
from headrace_router.messages_api.schemas import CountTokensBody, MessagesBody
from headrace_router.messages_api.service import MessagesService
from headrace_router.openapi import EVENTS, JSON, OF_BODIES, OF_CALLS, operation

_ERRORS = (*OF_BODIES, 504, 529)
_HEARD = {name: text for name, text in HEADERS.items() if name not in (RESUMABLE, LAST_EVENT_ID)}
_call = operation(
    MessageObject,
    body=MessagesBody,
    media=(JSON, EVENTS),
    headers=_HEARD,
    errors=(*OF_CALLS, *_ERRORS),
    error=MessageError,
)


def add_messages_routes(
    router: APIRouter,
    service: Callable[[], MessagesService],
    respond: Callable[[Answer], Response],
    read: Callable[[Request], Awaitable[Body]],
) -> None:
    """`respond` answers with what a call does; `read` takes a body in, which is to be closed."""

    @router.post("/v1/messages", openapi_extra=_call)
    async def create_message() -> Response:
        return respond(service().create)

    @router.post(
        "/v1/messages/count_tokens",
        openapi_extra=operation(TokenCount, body=CountTokensBody, errors=_ERRORS, error=MessageError),
    )
    async def count_message_tokens(request: Request) -> Response:
        with await read(request) as body:
            return json_response(await service().count_tokens(identity_of(request.scope), body))
