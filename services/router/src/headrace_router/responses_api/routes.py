"""Paths of the Responses API to handlers. No logic."""

from collections.abc import Awaitable, Callable
from typing import Annotated, Literal, NamedTuple

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from headrace_router.authentication import identity_of
from headrace_router.bodies import Body
from headrace_router.call import Call
from headrace_router.call_options import HEADERS, LAST_EVENT_ID, RESUMABLE
from headrace_router.call_response import Answer
from headrace_router.http_errors import json_response
from headrace_router.openapi import EVENTS, JSON, OF_BODIES, OF_CALLS, operation
from headrace_router.responses_api.answer_schemas import DeletedResponse, InputItems, InputTokens, ResponseObject
from headrace_router.responses_api.creation import ResponseCreator
from headrace_router.responses_api.kept_responses import KeptResponses
from headrace_router.responses_api.listing import DEFAULT_PAGE, MAX_PAGE, page_of
from headrace_router.responses_api.schemas import InputTokensBody, ResponsesBody
from headrace_shared.errors import InvalidRequest

OF_KEPT = (400, 404, 503)
_HEARD = {name: text for name, text in HEADERS.items() if name not in (RESUMABLE, LAST_EVENT_ID)}
_call = operation(ResponseObject, body=ResponsesBody, media=(JSON, EVENTS), headers=_HEARD, errors=OF_CALLS)


class ResponsesParts(NamedTuple):
    """What the handlers need."""

    creator: ResponseCreator
    kept: KeptResponses


def add_responses_routes(
    router: APIRouter,
    parts: Callable[[], ResponsesParts],
    respond: Callable[[Answer], Response],
    read: Callable[[Request], Awaitable[Body]],
) -> None:
    """`respond` answers with what a call does; `read` takes a body in, which is to be closed."""

    @router.post("/v1/responses", openapi_extra=_call)
    async def create_response() -> Response:
        return respond(parts().creator.create)

    @router.post(
        "/v1/responses/input_tokens", openapi_extra=operation(InputTokens, body=InputTokensBody, errors=OF_BODIES)
    )
    async def count_input_tokens(request: Request) -> Response:
        with await read(request) as body:
            return json_response(await parts().creator.input_tokens(identity_of(request.scope), body))

    @router.post("/v1/responses/compact", include_in_schema=False)
    async def compact_response() -> Response:
        """Else this path would be a response's, with the wrong method."""
        raise InvalidRequest("Conversations are not compacted here.", code="not_found")

    @router.get(
        "/v1/responses/{response_id}",
        openapi_extra=operation(ResponseObject, media=(JSON, EVENTS), errors=(*OF_KEPT, 408, 410, 429)),
    )
    async def retrieve_response(
        request: Request,
        response_id: str,
        stream: bool = False,
        starting_after: Annotated[int, Query(ge=-1, le=10**9)] = -1,
    ) -> Response:
        """With `stream`: the events of a background response behind the one with the number `starting_after`."""
        if not stream:
            return json_response(await parts().kept.retrieve(identity_of(request.scope), response_id))

        async def answer(call: Call, _: Body) -> None:
            await parts().kept.follow(call, response_id, starting_after)

        return respond(answer)

    @router.delete("/v1/responses/{response_id}", openapi_extra=operation(DeletedResponse, errors=OF_KEPT))
    async def delete_response(request: Request, response_id: str) -> Response:
        return json_response(await parts().kept.delete(identity_of(request.scope), response_id))

    @router.post("/v1/responses/{response_id}/cancel", openapi_extra=operation(ResponseObject, errors=OF_KEPT))
    async def cancel_response(request: Request, response_id: str) -> Response:
        return json_response(await parts().kept.cancel(identity_of(request.scope), response_id))

    @router.get("/v1/responses/{response_id}/input_items", openapi_extra=operation(InputItems, errors=OF_KEPT))
    async def list_input_items(
        request: Request,
        response_id: str,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = DEFAULT_PAGE,
    ) -> Response:
        items = await parts().kept.input_items(identity_of(request.scope), response_id)
        return json_response(page_of(items, order, after, limit))
