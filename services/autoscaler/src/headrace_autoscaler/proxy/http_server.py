"""A strict HTTP/1.1 server for few callers: one small request a connection, read whole before anything is decided.

h11 parses, so that what is ambiguous (two lengths, folded headers, bad chunks) is an error. Nothing of the caller's
bytes is ever passed on: who handles a request makes another one of it.
"""

import asyncio
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import NamedTuple

import h11
import msgspec
import structlog

from headrace_shared.listener import Listener

MAX_CONNECTIONS = 64
"""Stops last as long as the grace of what they stop."""
MAX_HEAD_BYTES = 16 * 1024
MAX_BODY_BYTES = 256 * 1024
READ_TIMEOUT_S = 10.0
WRITE_TIMEOUT_S = 10.0
_READ_BYTES = 8 * 1024
"""h11 counts a head that has not ended yet: what comes in one piece must not be much more than that."""

log = structlog.get_logger(__name__)


class HttpRequest(NamedTuple):
    method: str
    target: str
    body: bytes


class HttpReply(NamedTuple):
    status: int
    body: bytes
    content_type: str = "application/json"
    headers: tuple[tuple[str, str], ...] = ()


def refusal(status: int, reason: str) -> HttpReply:
    """In the form in which the engine tells its errors."""
    return HttpReply(status, msgspec.json.encode({"message": f"headrace-docker-proxy: {reason}"}))


class _Unreadable(Exception):
    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class HttpServer:
    def __init__(self, handle: Callable[[HttpRequest], Awaitable[HttpReply]]) -> None:
        self._handle = handle
        self._listener = Listener(
            self._serve, max_connections=MAX_CONNECTIONS, read_limit=_READ_BYTES, cuts_oldest=False
        )

    async def start(self, host: str, port: int) -> int:
        """Listens; returns the port. Raises OSError if it is taken."""
        return await self._listener.start(host, port)

    async def close(self) -> None:
        """Stops listening, and cuts whoever is connected."""
        await self._listener.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            answer = await self._answer(reader)
            if answer is not None:
                async with asyncio.timeout(WRITE_TIMEOUT_S):
                    writer.write(answer)
                    await writer.drain()
        except (TimeoutError, OSError):
            pass  # the caller is gone or does not read; there is nobody to tell

    async def _answer(self, reader: asyncio.StreamReader) -> bytes | None:
        """None if the caller closed without asking."""
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                request = await _read(reader)
        except TimeoutError:
            return _render(refusal(408, f"no whole request within {READ_TIMEOUT_S:.0f} s"), False)
        except h11.RemoteProtocolError as error:
            log.warning("unreadable request", reason=str(error))
            return _render(refusal(error.error_status_hint, "this is no proper HTTP request"), False)
        except _Unreadable as error:
            log.warning("request refused", status=error.status, reason=str(error))
            return _render(refusal(error.status, str(error)), False)
        return None if request is None else _render(await self._handle(request), request.method == "HEAD")


async def _read(reader: asyncio.StreamReader) -> HttpRequest | None:
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
    head: h11.Request | None = None
    body = bytearray()
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(await reader.read(_READ_BYTES))
        elif isinstance(event, h11.Request):
            head = event
            _check_head(head)
        elif isinstance(event, h11.Data):
            body += event.data
            if len(body) > MAX_BODY_BYTES:
                raise _Unreadable(413, f"the body exceeds {MAX_BODY_BYTES} bytes")
        elif isinstance(event, h11.EndOfMessage) and head is not None:
            return HttpRequest(head.method.decode("ascii"), head.target.decode("ascii", "replace"), bytes(body))
        else:
            return None


def _check_head(head: h11.Request) -> None:
    if head.http_version not in (b"1.0", b"1.1"):
        raise _Unreadable(505, "only HTTP/1.1 is spoken here")
    names = {name for name, _ in head.headers}
    if b"upgrade" in names or b"expect" in names or head.method == b"CONNECT":
        raise _Unreadable(403, "connections are not upgraded here")
    lengths = [value for name, value in head.headers if name == b"content-length"]
    if lengths and int(lengths[0]) > MAX_BODY_BYTES:
        raise _Unreadable(413, f"the body exceeds {MAX_BODY_BYTES} bytes")


def _render(reply: HttpReply, is_head: bool) -> bytes:
    lines = [
        f"HTTP/1.1 {reply.status} {HTTPStatus(reply.status).phrase}",
        f"Content-Type: {reply.content_type}",
        f"Content-Length: {len(reply.body)}",
        "Connection: close",
        *(f"{name}: {value}" for name, value in reply.headers),
    ]
    return "\r\n".join(lines).encode("ascii") + b"\r\n\r\n" + (b"" if is_head else reply.body)
