"""From a generation to the bytes of an answer, whole or streamed."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple
from urllib.parse import quote

import structlog
from msgspec import UNSET, UnsetType
from starlette.types import Send

from headrace_router import queue_reports, sse
from headrace_router.call_record import AnswerForm
from headrace_router.choices import ChoiceDelta, Delta
from headrace_router.generation import Generation
from headrace_router.http_errors import error_object, to_request_error
from headrace_router.model_queue import Place
from headrace_router.positions import Position
from headrace_router.responses import Formatter, UsageObject, to_json, usage_object
from headrace_shared.errors import BusError, RequestError
from headrace_shared.messages import RequestId

log = structlog.get_logger(__name__)

HELD_ID = "headrace-request-id"
"""Response header: under which the answer can be had again."""
MODEL = "headrace-model"
"""Response header: which model answers; it may not be the one that was asked for."""
FIRST_REPORT_S = 0.5
"""Who is answered sooner is told nothing of the queue; and by then all routers have told each other of it."""


class Reply(NamedTuple):
    """One client that waits for an answer."""

    request_id: RequestId
    """Of the call that queued the requests."""
    shown_id: str
    send: Send
    arrived_at: float
    """Monotonic."""
    form: AnswerForm
    formatter: Formatter
    num_choices: int
    on_token: Callable[[], None]
    """Called when the first tokens have come."""
    ping_interval_s: float
    sends_ids: bool = False
    held_id: RequestId | None = None
    told: Position | None = None
    """What the client has been told before."""
    queue_report_interval_s: float = 1.0
    tells_queue: bool = False
    """As events too, not only in comments."""


class StreamFailed(Exception):
    """The client has been told."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


class StreamCut(Exception):
    """The client is to continue at another router: its connection must break, not end."""


async def answer_whole(reply: Reply, generation: Generation) -> None:
    deltas: list[list[Delta]] = [[] for _ in range(reply.num_choices)]
    while not generation.is_complete:
        for event in await generation.next(reply.ping_interval_s):
            reply.on_token()
            deltas[event.choice].append(event.delta)
    body = to_json(reply.formatter.whole(deltas, usage_object(generation.usage)))
    headers = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        "openai-processing-ms": str(round(1000 * (time.monotonic() - reply.arrived_at))),
    }
    await _send_start(reply, headers)
    await _send_body(reply, body, is_last=True)


async def answer_stream(reply: Reply, generation: Generation) -> None:
    """The status is out before the first token, so failures become events. Raises StreamFailed after telling, and
    StreamCut."""
    await _send_start(reply, sse.HEADERS)
    chunks = _Chunks(reply)
    sent_at = time.monotonic()
    period_s = min(reply.queue_report_interval_s, reply.ping_interval_s)
    patience_s = min(FIRST_REPORT_S, period_s)
    try:
        while not generation.is_complete:
            events = await generation.next(patience_s)
            if events:
                reply.on_token()
            data = chunks.of(events)
            place = None if data else generation.place
            if not data and time.monotonic() - sent_at < patience_s:
                continue
            patience_s = reply.ping_interval_s if place is None else period_s
            if place is not None:
                data = _report(reply, place)
            elif not data:
                data = sse.PING
            await _send_body(reply, data)
            sent_at = time.monotonic()
    except (RequestError, BusError) as error:
        told = to_request_error(error)
        if told.code == "draining" and reply.sends_ids:
            raise StreamCut from error
        log.warning("stream failed", request_id=reply.request_id, code=told.code, reason=told.message)
        data = sse.event(to_json({"error": error_object(told, reply.shown_id)}))
        await _send_body(reply, chunks.rest() + data + sse.DONE, is_last=True)
        raise StreamFailed(told.code) from error
    end = chunks.usage(usage_object(generation.usage)) + sse.DONE
    await _send_body(reply, end, is_last=True)


def _report(reply: Reply, place: Place) -> bytes:
    told = queue_reports.comment(place)
    return told + queue_reports.typed_event(place, reply.request_id) if reply.tells_queue else told


class _Chunks:
    """Deltas to the events of one stream."""

    def __init__(self, reply: Reply) -> None:
        self._form = reply.form
        self._formatter = reply.formatter
        self._told = reply.told
        self._position = Position(reply.request_id, reply.num_choices) if reply.sends_ids else None
        self._gathered: dict[int, ChoiceDelta] = {}
        """By choice: what waits for more to make a chunk."""
        self._num_sent = [0] * reply.num_choices
        """Tokens in chunks."""

    def of(self, events: Sequence[ChoiceDelta]) -> bytes:
        parts = []
        for event in events:
            gathered = self._gather(event)
            if gathered is not None:
                parts.append(self._write(gathered))
        return b"".join(parts)

    def rest(self) -> bytes:
        """No more will come of what was to be a chunk."""
        rest = b"".join(map(self._write, self._gathered.values()))
        self._gathered.clear()
        return rest

    def _write(self, event: ChoiceDelta) -> bytes:
        usage: UsageObject | UnsetType | None = None if self._form.include_usage else UNSET
        if event.usage is not None:
            usage = usage_object(event.usage)
        # What was told before is formatted too: the formatter remembers what it has begun.
        chunk = self._formatter.chunk(event, usage)
        is_finished = event.delta.finish is not None
        if self._position is not None:
            self._position.advance(event.choice, event.num_tokens, is_finished=is_finished)
        if chunk is None or (
            self._told is not None and self._told.covers(event.choice, event.num_tokens, is_finished=is_finished)
        ):
            return b""
        return sse.event(to_json(chunk), self._id())

    def _gather(self, event: ChoiceDelta) -> ChoiceDelta | None:
        """None until there is enough for a chunk."""
        interval = self._form.stream_interval
        if interval == 1:
            return event
        is_finished = event.delta.finish is not None
        if self._told is not None and self._told.covers(event.choice, event.num_tokens, is_finished=is_finished):
            # A chunk ends where the client's knowledge does.
            self._num_sent[event.choice] = event.num_tokens
            return event
        before = self._gathered.pop(event.choice, None)
        event = event if before is None else before.then(event)
        num_sent = self._num_sent[event.choice]
        if num_sent and not is_finished and event.num_tokens - num_sent < interval:
            self._gathered[event.choice] = event
            return None
        self._num_sent[event.choice] = event.num_tokens
        return event

    def usage(self, usage: UsageObject) -> bytes:
        if not self._form.include_usage or (self._told is not None and self._told.has_usage):
            return b""
        if self._position is not None:
            self._position.has_usage = True
        return sse.event(to_json(self._formatter.usage_chunk(usage)), self._id())

    def _id(self) -> str | None:
        return None if self._position is None else self._position.to_id()


async def _send_start(reply: Reply, headers: Mapping[str, str]) -> None:
    own = {"x-request-id": reply.shown_id, MODEL: quote(reply.formatter.model, safe="/:@+")} | (
        {HELD_ID: reply.held_id} if reply.held_id is not None else {}
    )
    raw = [(name.encode(), value.encode()) for name, value in {**headers, **own}.items()]
    await reply.send({"type": "http.response.start", "status": 200, "headers": raw})


async def _send_body(reply: Reply, data: bytes, *, is_last: bool = False) -> None:
    await reply.send({"type": "http.response.body", "body": data, "more_body": not is_last})
