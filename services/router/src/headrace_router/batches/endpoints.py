"""Where a batch's lines may go: one entry for each endpoint."""

from typing import Any

import msgspec

from headrace_router.batches.execution import Answer
from headrace_router.bodies import Body
from headrace_router.call import Call
from headrace_router.calls import Caller
from headrace_shared.errors import InvalidRequest


def batch_endpoints(caller: Caller, create_response: Answer) -> dict[str, Answer]:
    """Path -> who answers a call there: whole, through `Call.send`, by the call's headers and identity."""

    async def respond(call: Call, body: Body) -> None:
        await create_response(call, Body(unstored(body.data)))

    return {
        "/v1/chat/completions": caller.chat,
        "/v1/completions": caller.completion,
        "/v1/embeddings": caller.embedding,
        "/v1/responses": respond,
    }


def unstored(data: bytes) -> bytes:
    """A response that is in the batch's output need not be kept elsewhere too, unless it is asked for."""
    try:
        body: dict[str, Any] = msgspec.json.decode(data, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise InvalidRequest("'body' must be a JSON object.", param="body") from error
    return data if body.get("store") is not None else msgspec.json.encode({**body, "store": False})
