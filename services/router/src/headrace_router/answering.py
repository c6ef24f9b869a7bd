"""From a generation to the bytes of an answer, whole or streamed."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple, Protocol
from urllib.parse import quote

import structlog
from starlette.types import Send

from headrace_router import queue_reports, sse
from headrace_router.choices import ChoiceDelta, Delta, Usage
from headrace_router.http_errors import to_request_error
from headrace_router.model_queue import Place
from headrace_router.writer import Writer
from headrace_shared.errors import BusError, RequestError
from headrace_shared.messages import RequestId

log = structlog.get_logger(__name__)

HELD_ID = "headrace-request-id"
"""Response header: under which the answer can be had again."""
MODEL = "headrace-model"
"""Response header: which model answers; it may not be the one that was asked for."""
MAX_INLINE_BYTES = 16 * 1024
"""Of embeddings; more are written in a thread."""
MAX_INLINE_TOKENS = 512
"""The same: 256 answers of a thousand tokens with log-probabilities would hold up all streams for a second."""
FIRST_REPORT_S = 0.5
"""Who is answered sooner is told nothing of the queue; and by then all routers have told each other of it."""


class Reply(NamedTuple):
    """One client that waits for an answer."""

    request_id: RequestId
    """Of the call that queued the requests."""
    shown_id: str
    send: Send
    writer: Writer
    num_choices: int
    on_token: Callable[[], None]
    """Called when the first tokens have come."""
    ping_interval_s: float
    is_resumable: bool = False
    """The client can go on behind any event."""
    held_id: RequestId | None = None
    queue_report_interval_s: float = 1.0
    tells_queue: bool = False
    """As events."""
    comments_queue: bool = False
    keep: Callable[[bytes], Awaitable[None]] | None = None
    """Called with the whole answer before its end is told."""


class Source(Protocol):
    """Where an answer comes from: `generation.Generation`, or what is kept of one."""

    @property
    def is_complete(self) -> bool: ...

    @property
    def usage(self) -> Usage: ...

    @property
    def place(self) -> Place | None: ...

    async def next(self, timeout_s: float) -> Sequence[ChoiceDelta]: ...


class StreamFailed(Exception):
    """The client has been told."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


class StreamCut(Exception):
    """The client is to continue at another router: its connection must break, not end."""


async def answer_whole(reply: Reply, generation: Source) -> None:
    deltas: list[list[Delta]] = [[] for _ in range(reply.num_choices)]
    while not generation.is_complete:
        for event in await generation.next(reply.ping_interval_s):
            reply.on_token()
            deltas[event.choice].append(event.delta)
    num_bytes = sum(len(parts[-1].embedding) for parts in deltas if parts)
    num_tokens = sum(len(part.tokens) for parts in deltas for part in parts)
    if num_bytes > MAX_INLINE_BYTES or num_tokens > MAX_INLINE_TOKENS:
        body = await asyncio.to_thread(reply.writer.whole, deltas, generation.usage)
    else:
        body = reply.writer.whole(deltas, generation.usage)
    await _keep(reply)
    await _send_start(reply, {"content-type": "application/json", "content-length": str(len(body))})
    await _send_body(reply, body, is_last=True)


async def answer_stream(reply: Reply, generation: Source) -> None:
    """The status is out before the first token, so failures become events. Raises StreamFailed after telling, and
    StreamCut."""
    await _send_start(reply, sse.HEADERS)
    writer = reply.writer
    if beginning := writer.begin():
        await _send_body(reply, beginning)
    sent_at = time.monotonic()
    period_s = min(reply.queue_report_interval_s, reply.ping_interval_s)
    patience_s = min(FIRST_REPORT_S, period_s)
    try:
        while not generation.is_complete:
            events = await generation.next(patience_s)
            if events:
                reply.on_token()
            data = writer.events(events)
            place = generation.place if reply.comments_queue and not data else None
            if not data and time.monotonic() - sent_at < patience_s:
                continue
            patience_s = reply.ping_interval_s if place is None else period_s
            if place is not None:
                data = _report(reply, place)
            elif not data:
                data = writer.ping
            await _send_body(reply, data)
            sent_at = time.monotonic()
    except (RequestError, BusError) as error:
        told = to_request_error(error)
        if told.code == "draining" and reply.is_resumable:
            raise StreamCut from error
        log.warning("stream failed", request_id=reply.request_id, code=told.code, reason=told.message)
        data = writer.failure(told, reply.shown_id)
        await _keep(reply)
        await _send_body(reply, data, is_last=True)
        raise StreamFailed(told.code) from error
    end = writer.end(generation.usage)
    await _keep(reply)
    await _send_body(reply, end, is_last=True)


def _report(reply: Reply, place: Place) -> bytes:
    told = queue_reports.comment(place)
    return told + queue_reports.typed_event(place, reply.request_id) if reply.tells_queue else told


async def _keep(reply: Reply) -> None:
    if reply.keep is not None:
        await reply.keep(reply.writer.result)


async def _send_start(reply: Reply, headers: Mapping[str, str]) -> None:
    own = {"x-request-id": reply.shown_id, MODEL: quote(reply.writer.model, safe="/:@+"), **reply.writer.headers} | (
        {HELD_ID: reply.held_id} if reply.held_id is not None else {}
    )
    raw = [(name.encode(), value.encode()) for name, value in {**headers, **own}.items()]
    await reply.send({"type": "http.response.start", "status": 200, "headers": raw})


async def _send_body(reply: Reply, data: bytes, *, is_last: bool = False) -> None:
    await reply.send({"type": "http.response.body", "body": data, "more_body": not is_last})
