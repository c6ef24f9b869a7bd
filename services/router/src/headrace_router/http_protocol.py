"""uvicorn's HTTP protocol with bounds on the head of a request, which it lacks: size, number of headers and time."""

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024
MAX_HEADERS = 100
HEAD_TIMEOUT_S = 15.0

_ERROR = b'{"error":{"message":"%s","type":"invalid_request_error","param":null,"code":"%s"}}'


class BoundedHttpProtocol(HttpToolsProtocol):
    """Closes connections whose request line and headers are too large or too slow."""

    _head_bytes = 0
    _is_head = False
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in the base class
        super().connection_made(transport)
        self._start_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_head:
            self._head_bytes += len(data)
        super().data_received(data)
        # A body may follow in the same piece of data; it counts only while the head is not complete.
        if self._is_head and self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(
                b"431 Request Header Fields Too Large", b"The request head is too large.", b"headers_too_large"
            )

    def send_400_response(self, msg: str) -> None:
        self._refuse(b"400 Bad Request", b"This is no valid HTTP request.", b"invalid_http")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._start_head()

    def on_headers_complete(self) -> None:
        self._end_head()
        if len(self.headers) > MAX_HEADERS:
            self._refuse_head(b"There are too many headers.")
            raise ValueError("too many headers")  # makes the parser stop
        super().on_headers_complete()

    def _start_head(self) -> None:
        self._end_head()
        self._is_head = True
        self._head_bytes = 0
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
        if not self.transport.is_closing():
            body = _ERROR % (message, code)
            head = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
            self.transport.write(head % (status, len(body)) + body)
            self.transport.close()
