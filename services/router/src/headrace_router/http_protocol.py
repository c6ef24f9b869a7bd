"""uvicorn's HTTP protocol with bounds that it lacks: on a request's head (size, number of headers, time), and on what
may stand around the pieces of its body (trailers, chunk extensions)."""

import asyncio

from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

MAX_HEAD_BYTES = 64 * 1024
MAX_HEADERS = 100
HEAD_TIMEOUT_S = 15.0
MAX_PIPELINED = 8
"""Requests of a connection that wait for the one before; with more of them nothing is read, not even the client's end.
"""

_ERROR = b'{"error":{"message":"%s","type":"invalid_request_error","param":null,"code":"%s"}}'


class BoundedHttpProtocol(HttpToolsProtocol):
    """Closes connections whose request line and headers are too large or too slow."""

    _unfruitful_bytes = 0
    """Received since a head was complete, or a piece of a body, or a request; before that: since it began. A request
    line, headers, trailers and chunk extensions all count, and only they can get long."""
    _is_head = False
    _head_timer: asyncio.TimerHandle | None = None
    _answered: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in the base class
        super().connection_made(transport)
        self._start_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        if self._answered is not None and not self._answered.response_complete:
            # The base class tells the newest request only, which with pipelining is not the one being answered.
            self._answered.disconnected = True
            self._answered.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unfruitful_bytes += len(data)
        super().data_received(data)
        if self._unfruitful_bytes > MAX_HEAD_BYTES:
            self._refuse_head(b"The request head is too large.")

    def send_400_response(self, msg: str) -> None:
        self._refuse(b"400 Bad Request", b"This is no valid HTTP request.", b"invalid_http")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._start_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_head:  # else: a trailer; nobody wants it
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._end_head()
        self._unfruitful_bytes = 0
        if len(self.headers) > MAX_HEADERS:
            self._refuse_head(b"There are too many headers.")
            raise ValueError("too many headers")  # makes the parser stop
        # A head that came in one piece has not been counted yet.
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > MAX_HEAD_BYTES:
            self._refuse_head(b"The request head is too large.")
            raise ValueError("too large a head")
        super().on_headers_complete()
        if 0 < len(self.pipeline) <= MAX_PIPELINED:
            self.flow.resume_reading()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        self._unfruitful_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unfruitful_bytes = 0
        super().on_message_complete()

    def _start_head(self) -> None:
        self._end_head()
        self._is_head = True
        self._unfruitful_bytes = 0
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)

    def _end_head(self) -> None:
        self._is_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse_head(self, message: bytes) -> None:
        self._refuse(b"431 Request Header Fields Too Large", message, b"headers_too_large")

    def _refuse(self, status: bytes, message: bytes, code: bytes) -> None:
        self._end_head()
        if self.transport.is_closing():
            return
        # Behind a request that is being answered an error would land in the middle of the answer.
        if self._answered is None or not self._answered.response_started or self._answered.response_complete:
            body = _ERROR % (message, code)
            head = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
            self.transport.write(head % (status, len(body)) + body)
        self.transport.close()
