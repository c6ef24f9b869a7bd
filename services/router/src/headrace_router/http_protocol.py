"""uvicorn's HTTP protocol with bounds that it lacks: on connections, on a request's head (form, size, time), on what
may stand around the pieces of its body (trailers, chunk extensions, chunks), and on a body that nobody wants."""

import asyncio
import re
from collections.abc import Callable
from typing import Any

from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from headrace_router.connection_counts import ConnectionCounts
from headrace_router.request_head import (
    INVALID,
    MAX_HEAD_BYTES,
    MAX_TARGET_BYTES,
    TINY_CHUNKS,
    TOO_LARGE,
    TOO_LONG,
    TOO_MANY_CONNECTIONS,
    Head,
    Refusal,
    refusal_of,
)
from headrace_router.unchunked import unchunked

HEAD_TIMEOUT_S = 15.0
LINGER_S = 10.0
"""For the rest of a body whose request has been answered: clients that write before they read would see a reset
connection instead of the answer."""
REFUSED_LINGER_S = 2.0
MAX_IGNORED_BYTES = 1 << 20
"""What a client whose request was refused still sends is read for so long, and up to this."""
MAX_PIPELINED = 8
"""Requests of a connection that wait for the one before; with more of them nothing is read, not even the client's end.
"""
MAX_SMALL_CHUNKS = 2048
MIN_CHUNK_BYTES = 64
"""On average, of a body's further chunks: each costs as much to parse as a kilobyte."""

_ERROR = b'{"error":{"message":"%s","type":"invalid_request_error","param":null,"code":"%s"}}'
_UPGRADE = re.compile(rb"(?i)(?<=\r\n)upgrade(?=[ \t]*:)")


class BoundedHttpProtocol(HttpToolsProtocol):
    """Closes connections whose requests are malformed, too large or too slow."""

    def __init__(self, counts: ConnectionCounts, refused: Callable[[str], None], **arguments: Any) -> None:
        """`refused` is told the code of each refusal."""
        super().__init__(**arguments)
        self._counts = counts
        self._tell_refused = refused
        self._address: str | None = None
        """Under which the connection is counted."""
        self._unfruitful_bytes = 0
        """Received since a head was complete, or a piece of a body, or a request; before that: since it began. A
        request line, headers, trailers and chunk extensions all count, and only they can get long."""
        self._is_refused = False
        self._is_head = False
        self._is_body = False
        self._num_complete = 0
        """Requests."""
        self._num_chunks = 0
        self._num_body_bytes = 0
        self._patience: asyncio.TimerHandle | None = None
        """With a head, or with a body that nobody wants."""
        self._answered: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in the base class
        super().connection_made(transport)
        address = self.client[0] if self.client is not None else ""
        if not self._counts.enter(address):
            self._is_refused = True
            self._tell_refused(TOO_MANY_CONNECTIONS.code.decode())
            transport.write(_answer(TOO_MANY_CONNECTIONS))
            transport.close()
            return
        self._address = address
        self._start_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_patience()
        if self._address is not None:
            self._counts.leave(self._address)
            self._address = None
        if self._answered is not None and not self._answered.response_complete:
            # The base class tells the newest request only, which with pipelining is not the one being answered.
            self._answered.disconnected = True
            self._answered.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unfruitful_bytes += len(data)
        if self._is_refused:
            if self._unfruitful_bytes > MAX_IGNORED_BYTES:
                self.transport.close()
            return
        num_bytes, num_complete = self._unfruitful_bytes, self._num_complete
        super().data_received(data if self._is_body else _without_upgrade(data))
        if self._is_head and self._num_complete == num_complete:
            self._unfruitful_bytes = num_bytes  # all of it belongs to the head that began in it
        self._mind_idleness()
        if self._unfruitful_bytes > MAX_HEAD_BYTES:
            is_path = self._is_head and len(getattr(self, "url", b"")) > MAX_TARGET_BYTES
            self._refuse(TOO_LONG if is_path else TOO_LARGE)

    def send_400_response(self, msg: str) -> None:
        self._refuse(INVALID)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._start_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_head:  # else: a trailer; nobody wants it
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._end_patience()
        self._is_head = False
        self._is_body = True
        self._unfruitful_bytes = self._num_chunks = self._num_body_bytes = 0
        version, is_upgrade = self.parser.get_http_version(), self.parser.should_upgrade()
        refusal = refusal_of(Head(version, self.url, self.headers, is_upgrade))
        if refusal is not None:
            self._stop(refusal)
        super().on_headers_complete()
        if 0 < len(self.pipeline) <= MAX_PIPELINED:
            self.flow.resume_reading()

    def on_chunk_header(self) -> None:
        self._num_chunks += 1
        if self._num_chunks > MAX_SMALL_CHUNKS + self._num_body_bytes // MIN_CHUNK_BYTES:
            self._stop(TINY_CHUNKS)

    def on_body(self, body: bytes) -> None:
        self._unfruitful_bytes = 0
        self._num_body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unfruitful_bytes = 0
        self._num_complete += 1
        self._is_body = False
        self._end_patience()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_body and self.cycle.response_complete and not self.transport.is_closing():
            self._start_patience(LINGER_S)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, unchunked(app, cycle) if cycle.scope["http_version"] == "1.0" else app)

    def _unsupported_upgrade_warning(self) -> None:
        return  # it has been refused; a line in the log for each would be another way to flood us

    def _mind_idleness(self) -> None:
        """Blank lines between requests end the base class's waiting for the next one, and begin nothing."""
        is_answering = self._answered is not None and not self._answered.response_complete
        if not is_answering and self._patience is None and self.timeout_keep_alive_task is None:
            self._start_patience(HEAD_TIMEOUT_S)

    def _start_head(self) -> None:
        self._is_head = True
        self._unfruitful_bytes = 0
        self._start_patience(HEAD_TIMEOUT_S)

    def _start_patience(self, timeout_s: float) -> None:
        self._end_patience()
        self._patience = self.loop.call_later(timeout_s, self.transport.close)

    def _end_patience(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _stop(self, refusal: Refusal) -> None:
        self._refuse(refusal)
        raise ValueError(refusal.code)  # makes the parser stop

    def _refuse(self, refusal: Refusal) -> None:
        if self._is_refused or self.transport.is_closing():
            return
        self._end_patience()
        self._is_refused = True
        self._tell_refused(refusal.code.decode())
        answered = self._answered
        if answered is not None and answered.response_started and not answered.response_complete:
            self.transport.close()  # an error would land in the middle of the answer
            return
        for cycle in (answered, self.cycle):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self.transport.write(_answer(refusal))
        # Closed while more is coming in, the connection would be reset, and the client might not see the answer.
        self.transport.write_eof()
        self._unfruitful_bytes = 0
        self._start_patience(REFUSED_LINGER_S)


def _answer(refusal: Refusal) -> bytes:
    body = _ERROR % (refusal.message, refusal.code)
    head = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
    return head % (refusal.status, len(body)) + body


def _without_upgrade(data: bytes) -> bytes:
    """Some clients offer HTTP/2 with each request. A server may ignore that; the parser would ignore the body."""
    end = data.find(b"\r\n\r\n")
    match = _UPGRADE.search(data, 0, end) if end >= 0 else None
    return data if match is None else data[: match.start()] + b"ignored" + data[match.end() :]
