"""A tiny HTTP server for probes: /live, /health and /metrics, for services that have no web server of their own."""

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import NamedTuple

from headrace_shared.listener import Listener
from headrace_shared.telemetry import METRICS_CONTENT_TYPE

MAX_CONNECTIONS = 32
"""With more of them the oldest is cut: whoever holds connections open keeps no probe out."""
_TIMEOUT_S = 5.0
_MAX_HEAD_BYTES = 8192


class HealthReply(NamedTuple):
    status: int
    content_type: str
    body: bytes


def health_reply(not_ready: str | None) -> HealthReply:
    """200 when ready, 503 with the reason when not."""
    if not_ready is None:
        return HealthReply(200, "text/plain; charset=utf-8", b"ready\n")
    return HealthReply(503, "text/plain; charset=utf-8", f"not ready: {not_ready}\n".encode())


class HealthServer:
    """Answers GET and HEAD, one request a connection."""

    def __init__(self, not_ready: Callable[[], str | None], render_metrics: Callable[[], bytes]) -> None:
        self._not_ready = not_ready
        self._render_metrics = render_metrics
        self._listener = Listener(
            self._serve, max_connections=MAX_CONNECTIONS, read_limit=_MAX_HEAD_BYTES, cuts_oldest=True
        )

    async def start(self, host: str, port: int) -> int:
        """Listens; returns the port (useful for port 0). Raises OSError if it is taken."""
        return await self._listener.start(host, port)

    async def close(self) -> None:
        """Stops listening, and cuts whoever is connected."""
        await self._listener.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                try:
                    head = await reader.readuntil(b"\r\n\r\n")
                except asyncio.LimitOverrunError:
                    reply = HealthReply(431, "text/plain; charset=utf-8", b"the request's head is too large\n")
                    writer.write(_bytes_of(reply))
                else:
                    writer.write(self._answer(head))
                await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError):
            pass  # a broken or idle client; there is nobody to tell

    def _answer(self, head: bytes) -> bytes:
        method, _, rest = head.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        if method not in (b"GET", b"HEAD"):
            reply = HealthReply(405, "text/plain; charset=utf-8", b"only GET\n")
        elif path == b"/live":
            reply = HealthReply(200, "text/plain; charset=utf-8", b"alive\n")
        elif path == b"/health":
            reply = health_reply(self._not_ready())
        elif path == b"/metrics":
            reply = HealthReply(200, METRICS_CONTENT_TYPE, self._render_metrics())
        else:
            reply = HealthReply(404, "text/plain; charset=utf-8", b"try /live, /health or /metrics\n")
        return _bytes_of(reply, is_head=method == b"HEAD")


def _bytes_of(reply: HealthReply, *, is_head: bool = False) -> bytes:
    phrase = HTTPStatus(reply.status).phrase
    lines = (
        f"HTTP/1.1 {reply.status} {phrase}\r\nContent-Type: {reply.content_type}\r\n"
        f"Content-Length: {len(reply.body)}\r\nConnection: close\r\n\r\n"
    )
    return lines.encode() + (b"" if is_head else reply.body)
