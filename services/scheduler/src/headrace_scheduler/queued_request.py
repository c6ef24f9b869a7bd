"""Messages of the queue, as they are read. What a client sent was checked by its router, so this is about messages that
no router of ours has written. Pure."""

import re

from msgspec import Struct

from headrace_shared import codec
from headrace_shared.errors import ProtocolError
from headrace_shared.messages import Request, RequestId, RouterId

MAX_CHOICES = 128

_REQUEST_ID = re.compile(r"[0-9a-f]{32}")
_ROUTER_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


class RequestHead(Struct, frozen=True, kw_only=True, tag="Request"):
    """What is needed to tell a router that its request is unusable."""

    request_id: RequestId
    router: RouterId


def parse_request(data: bytes, model: str) -> Request:
    """Raises ProtocolError for what cannot be run."""
    request = codec.decode(data, Request)
    if not _are_ids(request.request_id, request.router):
        raise ProtocolError("the ids are malformed")
    if request.model != model:
        raise ProtocolError(f"it is for the model {request.model!r}")
    if not request.prompt or len(request.prompt) % 4:
        raise ProtocolError("the prompt is malformed")
    if not 1 <= request.num_choices <= MAX_CHOICES or request.stop.max_tokens < 1:
        raise ProtocolError("the number of choices or tokens is out of range")
    return request


def head_of(data: bytes) -> RequestHead | None:
    """None: nobody can be told."""
    try:
        head = codec.decode(data, RequestHead)
    except ProtocolError:
        return None
    return head if _are_ids(head.request_id, head.router) else None


def _are_ids(request_id: RequestId, router: RouterId) -> bool:
    return bool(_REQUEST_ID.fullmatch(request_id) and _ROUTER_ID.fullmatch(router))
