"""Reads request bodies within bounds, and decides which request id is shown."""

import asyncio
import codecs
import re
from typing import NamedTuple

from starlette.datastructures import Headers
from starlette.types import Receive

from headrace_shared.errors import InvalidRequest, Overloaded

GRACE_S = 10.0
MIN_BYTES_PER_S = 1024
"""A body that has come for longer than GRACE_S must have come at this rate."""

LARGE_AT_ONCE = 16
"""So many of the largest bodies, or more smaller ones, may be there at a time: coming, or on their way to tokens."""
SMALL_PART = 256
"""Small is what is no larger than such a part of the largest: 64 KiB of 16 MiB."""
SMALL_AT_ONCE = 1024

LOOK_BYTES = 64 * 1024
"""So much of a body is looked at before the rest is read."""
BLANKS = b" \t\r\n"
"""Of JSON."""

_SAFE_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


class ClientGone(Exception):
    """The client went away before it had sent its request."""


class ByteBudget:
    """For bodies, from their first byte until nothing is left of them: many at a time would otherwise fill the memory,
    each within its own limit. Small ones have a part of their own, so that large ones never keep them out."""

    def __init__(self, max_body_bytes: int) -> None:
        self.max_small = max_body_bytes // SMALL_PART
        self._left = {False: LARGE_AT_ONCE * max_body_bytes, True: SMALL_AT_ONCE * self.max_small}

    def take(self, num: int) -> None:
        """Of a body that holds `num` bytes then. Raises Overloaded."""
        is_small = num <= self.max_small
        if num > self._left[is_small]:
            raise Overloaded("Too many large requests are coming at once.", retry_after_s=1.0)
        self._left[is_small] -= num

    def give_back(self, num: int) -> None:
        self._left[num <= self.max_small] += num


class Share:
    """One body's, of a budget."""

    def __init__(self, budget: ByteBudget | None) -> None:
        self.budget = budget
        self._num = 0

    def become(self, num: int) -> None:
        """Raises Overloaded, and holds nothing then."""
        if self.budget is None:
            return
        before, self._num = self._num, 0
        self.budget.give_back(before)
        self.budget.take(num)
        self._num = num

    def counted(self, num: int) -> int:
        """0 for what is small."""
        return 0 if self.budget is None or num <= self.budget.max_small else num


class Body:
    """What a client has sent, for as long as it is needed: first its bytes, then what was made of them."""

    def __init__(self, data: bytes, share: Share | None = None) -> None:
        self._data: bytes | None = data
        self._share = share
        self._num_held = self.num_bytes = len(data)
        self.digest = b""
        """Of endpoint and bytes, once it was read."""
        self.is_part = False

    @property
    def data(self) -> bytes:
        assert self._data is not None, "the bytes have been read"
        return self._data

    def was_read(self, digest: bytes, num_bytes: int) -> None:
        """The bytes are let go: what was made of them takes `num_bytes`. Raises Overloaded."""
        self._data, self.digest = None, digest
        self._hold(num_bytes)

    def add(self, num_bytes: int) -> None:
        """What belongs to it comes from elsewhere, and counts as if it had been sent. Raises Overloaded."""
        self.num_bytes += num_bytes
        self._hold(self._num_held + num_bytes)

    def is_tokens(self, num_bytes: int) -> None:
        """Only its tokens will stay, until the answer has ended; few are not counted. Raises Overloaded."""
        if self._share is not None:
            self._hold(self._share.counted(num_bytes))

    def part(self) -> "Body":
        """For a part of what was made of it, which may be asked for more than once. To be closed."""
        part = Body(b"", None if self._share is None else Share(self._share.budget))
        part.is_part = True
        part.was_read(self.digest, 0)
        part.num_bytes = self.num_bytes
        return part

    def close(self) -> None:
        """Nothing is left of it. May be called again."""
        self._data = None
        self._hold(0)

    def __enter__(self) -> "Body":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _hold(self, num_bytes: int) -> None:
        self._num_held = num_bytes
        if self._share is not None:
            self._share.become(num_bytes)


class BodyLimits(NamedTuple):
    max_bytes: int
    timeout_s: float
    budget: ByteBudget | None = None
    """Of all bodies together."""


async def read_json_body(headers: Headers, receive: Receive, limits: BodyLimits) -> bytes:
    """Of a body that is soon done with. Raises as `receive_json`."""
    with await receive_json(headers, receive, limits) as body:
        return body.data


async def receive_json(headers: Headers, receive: Receive, limits: BodyLimits) -> Body:
    """To be closed. Raises InvalidRequest (413 before anything is kept, 415, 408), Overloaded or ClientGone."""
    media_type = headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        # Browsers send text/plain and forms to other sites without asking.
        raise InvalidRequest("The content type must be application/json.", code="unsupported_media_type")
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise InvalidRequest("Compressed bodies are not supported.", code="unsupported_media_type")
    declared = headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limits.max_bytes:
        raise _too_large(limits.max_bytes)
    share = Share(limits.budget)
    try:
        return Body(await _received(receive, limits, share), share)
    except BaseException:
        share.become(0)
        raise


async def _received(receive: Receive, limits: BodyLimits, share: Share) -> bytes:
    """Without the byte order mark that Windows' programs put before it (RFC 8259 §8.1 allows to ignore it)."""
    parts: list[bytes] = []
    size = 0
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
                share.become(size)
                parts.append(part)
                if not message.get("more_body", False):
                    return b"".join(parts).removeprefix(codecs.BOM_UTF8)
                if size - len(part) <= LOOK_BYTES < size:
                    _check_beginning(b"".join(parts))
    except TimeoutError:
        raise InvalidRequest("The request body came too slowly.", code="body_timeout") from None


def _check_beginning(data: bytes) -> None:
    """Megabytes that cannot become an object need not be read. Raises InvalidRequest."""
    if not data.removeprefix(codecs.BOM_UTF8).lstrip(BLANKS).startswith(b"{"):
        raise InvalidRequest("The body must be a JSON object.", code="invalid_type")


def shown_request_id(headers: Headers, own: str) -> str:
    """The client's id if it is harmless, else our own. Only ever echoed."""
    given = headers.get("x-request-id", "")
    return given if _SAFE_REQUEST_ID.fullmatch(given) else own


def _too_large(limit: int) -> InvalidRequest:
    return InvalidRequest(f"The request body exceeds {limit} bytes.", code="payload_too_large")
