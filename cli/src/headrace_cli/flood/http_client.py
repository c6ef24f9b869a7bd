"""Streamed answers over HTTP/1.1 at the least cost: a generator that is slow measures itself.

One asyncio protocol a connection, the C parser that uvicorn uses, no task per chunk: text is timed in the callback that
brings it. Connections are kept and used again.
"""

import asyncio
import ssl
from collections.abc import Callable
from typing import NamedTuple, Protocol, cast
from urllib.parse import urlsplit

import httptools

from headrace_cli.settings import server_url
from headrace_shared.errors import ConfigError

CONNECT_TIMEOUT_S = 10.0
MAX_BODY = 1 << 20
"""Of an answer that is no stream."""


class ConnectionBroken(Exception):
    """Before the whole answer had come."""


class Target(NamedTuple):
    host: str
    port: int
    path: str
    """Before the interface's own paths; without a slash at its end."""
    tls: ssl.SSLContext | None

    @classmethod
    def parse(cls, url: str) -> "Target":
        """Raises ConfigError."""
        parts = urlsplit(server_url(url))
        try:
            port = parts.port
        except ValueError as error:
            raise ConfigError("--url", f"{url}: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError("--url", f"must be http://HOST:PORT or https://HOST:PORT, not {url!r}")
        is_tls = parts.scheme == "https"
        tls = ssl.create_default_context() if is_tls else None
        return cls(parts.hostname, port or (443 if is_tls else 80), parts.path, tls)


class Listener(Protocol):
    """Hears an answer while it comes."""

    def on_status(self, status: int, content_type: str) -> None: ...

    def on_data(self, data: bytes) -> None: ...


class _Connection(asyncio.Protocol):
    """One request at a time."""

    def __init__(self, on_idle_lost: "Callable[[_Connection], None]") -> None:
        self._on_idle_lost = on_idle_lost
        self._parser = httptools.HttpResponseParser(self)
        self._listener: Listener | None = None
        self._done: asyncio.Future[None] | None = None
        self._content_type = ""
        self._is_reusable = False
        self._has_length = False
        self._ends_at_close = False
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is one, but does not inherit from it

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._on_idle_lost(self)
        if self._ends_at_close and exc is None:
            self._finish()
        else:
            self._fail(ConnectionBroken(str(exc or "the server closed the connection")))

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(ConnectionBroken(f"no HTTP: {error}"))
            self.close()

    def request(self, head: bytes, listener: Listener) -> "asyncio.Future[None]":
        assert self.transport is not None and self._done is None, self.transport
        self._listener = listener
        self._parser = httptools.HttpResponseParser(self)
        self._content_type = ""
        self._has_length = False
        self._ends_at_close = False
        self._is_reusable = False
        self._done = asyncio.get_running_loop().create_future()
        self.transport.write(head)
        return self._done

    @property
    def is_idle(self) -> bool:
        return self.transport is not None and not self.transport.is_closing() and self._is_reusable

    def close(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    # What the parser calls.

    def on_header(self, name: bytes, value: bytes) -> None:
        lowered = name.lower()
        if lowered == b"content-type":
            self._content_type = value.decode("latin-1")
        elif lowered in (b"content-length", b"transfer-encoding"):
            self._has_length = True

    def on_headers_complete(self) -> None:
        self._ends_at_close = not self._has_length
        if self._listener is not None:
            self._listener.on_status(self._parser.get_status_code(), self._content_type)

    def on_body(self, body: bytes) -> None:
        if self._listener is not None:
            self._listener.on_data(body)

    def on_message_complete(self) -> None:
        self._ends_at_close = False
        self._is_reusable = self._parser.should_keep_alive()
        self._finish()

    def _finish(self) -> None:
        done, self._done, self._listener = self._done, None, None
        if done is not None and not done.done():
            done.set_result(None)

    def _fail(self, error: Exception) -> None:
        done, self._done, self._listener = self._done, None, None
        if done is not None and not done.done():
            done.set_exception(error)


class HttpClient:
    """Belongs to one event loop. `close` it."""

    def __init__(self, target: Target, api_key: str) -> None:
        self._target = target
        host = f"[{target.host}]" if ":" in target.host else target.host
        fields = [f"Host: {host}:{target.port}", "Content-Type: application/json"]
        if api_key:
            fields.append(f"Authorization: Bearer {api_key}")
        if any("\r" in field or "\n" in field for field in fields):
            raise ConfigError("api_key", "holds a line break")
        self._fields = "\r\n".join(fields)
        self._idle: dict[_Connection, None] = {}
        """Used newest first, so that what is not needed any more times out."""

    async def send(
        self, method: str, path: str, body: bytes, listener: Listener, on_sent: Callable[[], object] = lambda: None
    ) -> None:
        """Returns when the whole answer has come. Raises OSError, TimeoutError or ConnectionBroken."""
        head = (
            f"{method} {self._target.path}{path} HTTP/1.1\r\n{self._fields}\r\nContent-Length: {len(body)}\r\n\r\n"
        ).encode()
        connection = await self._connection()
        try:
            done = connection.request(head + body, listener)
            on_sent()
            await done
        except BaseException:
            connection.close()
            raise
        if connection.is_idle:
            self._idle[connection] = None
        else:
            connection.close()

    def close(self) -> None:
        for connection in list(self._idle):
            connection.close()

    async def _connection(self) -> _Connection:
        while self._idle:
            connection, _ = self._idle.popitem()
            if connection.is_idle:
                return connection
        target = self._target
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            _, made = await asyncio.get_running_loop().create_connection(
                lambda: _Connection(self._forget), target.host, target.port, ssl=target.tls
            )
        return made

    def _forget(self, connection: _Connection) -> None:
        self._idle.pop(connection, None)


class WholeAnswer:
    """A listener that keeps everything, up to a bound."""

    def __init__(self) -> None:
        self.status = 0
        self.body = bytearray()

    def on_status(self, status: int, content_type: str) -> None:
        self.status = status

    def on_data(self, data: bytes) -> None:
        self.body += data[: MAX_BODY - len(self.body)]
