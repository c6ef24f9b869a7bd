"""Reads request bodies within bounds, and decides which request id is shown."""

import asyncio
import re
from typing import NamedTuple

from starlette.datastructures import Headers
from starlette.types import Receive

from headrace_shared.errors import InvalidRequest, Overloaded

GRACE_S = 10.0
MIN_BYTES_PER_S = 1024
"""A body that has come for longer than GRACE_S must have come at this rate."""

_SAFE_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


class ClientGone(Exception):
    """The client went away before it had sent its request."""


class ByteBudget:
    """For bodies that are still coming: many at a time would otherwise fill the memory, each within its own limit."""

    def __init__(self, most: int) -> None:
        self._left = most

    def take(self, num: int) -> None:
        """Raises Overloaded."""
        if num > self._left:
            raise Overloaded("Too many large requests are coming at once.", retry_after_s=1.0)
        self._left -= num

    def give_back(self, num: int) -> None:
        self._left += num


class BodyLimits(NamedTuple):
    max_bytes: int
    timeout_s: float
    budget: ByteBudget | None = None
    """Of all bodies together."""


async def read_json_body(headers: Headers, receive: Receive, limits: BodyLimits) -> bytes:
    """Raises InvalidRequest (413 before anything is kept, 415, 408), Overloaded or ClientGone."""
    media_type = headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        # Browsers send text/plain and forms to other sites without asking.
        raise InvalidRequest("The content type must be application/json.", code="unsupported_media_type")
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise InvalidRequest("Compressed bodies are not supported.", code="unsupported_media_type")
    declared = headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limits.max_bytes:
        raise _too_large(limits.max_bytes)
    parts: list[bytes] = []
    size = num_taken = 0
    loop = asyncio.get_running_loop()
    began_at = loop.time()
    try:
        async with asyncio.timeout(limits.timeout_s) as patience:
            while True:
                # Who sends a byte now and then keeps a place without being a user.
                expected_s = GRACE_S + size / MIN_BYTES_PER_S
                patience.reschedule(began_at + min(limits.timeout_s, expected_s))
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                part = message.get("body", b"")
                size += len(part)
                if size > limits.max_bytes:
                    raise _too_large(limits.max_bytes)
                if limits.budget is not None:
                    limits.budget.take(len(part))
                    num_taken = size
                parts.append(part)
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError:
        raise InvalidRequest("The request body came too slowly.", code="body_timeout") from None
    finally:
        if limits.budget is not None:
            limits.budget.give_back(num_taken)


def shown_request_id(headers: Headers, own: str) -> str:
    """The client's id if it is harmless, else our own. Only ever echoed."""
    given = headers.get("x-request-id", "")
    return given if _SAFE_REQUEST_ID.fullmatch(given) else own


def _too_large(limit: int) -> InvalidRequest:
    return InvalidRequest(f"The request body exceeds {limit} bytes.", code="payload_too_large")
