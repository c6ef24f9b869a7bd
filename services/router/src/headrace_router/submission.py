"""A request into the queue, exactly once or not at all; and its token log out of the broker."""

import asyncio
from collections.abc import Iterable
from typing import NamedTuple

import structlog
from msgspec.structs import replace

from headrace_router.admission import no_answer
from headrace_router.call_trace import CallTrace
from headrace_router.inflight import Mailbox
from headrace_router.partitioning import partition_of
from headrace_router.prompt import Prompt
from headrace_shared.bus import Bus
from headrace_shared.codec import decode, encode
from headrace_shared.errors import BusError, BusUnavailable, OutcomeUnknown, ProtocolError
from headrace_shared.messages import LogMessage, Request, RequestEnded, TokenFrame
from headrace_shared.subjects import REQUESTS, TOKENS, Queue, num_partitions, tokens_subject

log = structlog.get_logger(__name__)

MAX_LOGGED = 100_000
"""Most events read from one request's log, unless its answers are longer than that:"""
EVENTS_PER_TOKEN = 2
"""each token comes once an attempt at most, and attempts that tell tokens anew are few. All logs have 256 MiB."""


class TokenLog(NamedTuple):
    frames: list[TokenFrame]
    ended: RequestEnded | None


class LoggedEvent(NamedTuple):
    position: int
    """In the stream of all token logs."""
    event: LogMessage


async def submit(bus: Bus, prompt: Prompt, mailbox: Mailbox, timeout_s: float, trace: CallTrace | None = None) -> None:
    """Queues the request; `mailbox` is registered for it. While the broker is away it is tried again: the queue stores
    a request id once, so that an attempt whose outcome is unknown can simply be repeated. Raises Overloaded after
    `timeout_s`, or what the broker says. `prompt.may_be_queued` then tells whether something may be left there."""
    request = prompt.request
    beginning = prompt.cache_key.encode(errors="surrogatepass") or request.prompt
    partition = partition_of(beginning, num_partitions(request.lane, prompt.flow))
    subject = Queue(request.model, request.lane, prompt.flow, partition).subject
    if trace is None:
        await _submit(bus, prompt, subject, request, mailbox, timeout_s)
        return
    span = trace.publish(request, subject)
    error: str | None = "unavailable"
    try:
        request = replace(request, trace=span.context.to_headers())
        await _submit(bus, prompt, subject, request, mailbox, timeout_s)
        error = None
    finally:
        span.end(error=error)


async def _submit(bus: Bus, prompt: Prompt, subject: str, request: Request, mailbox: Mailbox, timeout_s: float) -> None:
    data = encode(request)
    # The body is what counts; the header is for others who look at the stream. Some brokers rename it.
    headers = request.trace
    now = asyncio.get_running_loop().time
    until = now() + timeout_s
    is_unknown = False
    delay_s = 0.05
    while True:
        prompt.may_be_queued = True
        try:
            prompt.stream_sequence = await bus.enqueue(subject, data, message_id=request.request_id, headers=headers)
            return
        except OutcomeUnknown:
            is_unknown = True
        except BusUnavailable:
            prompt.may_be_queued = is_unknown
        except BusError:
            prompt.may_be_queued = is_unknown
            raise
        if mailbox.holds(request.request_id):
            return
        if now() >= until:
            raise no_answer()
        await asyncio.sleep(delay_s)
        delay_s = min(1.0, 2 * delay_s)


async def are_queued(bus: Bus, prompts: Iterable[Prompt]) -> bool:
    """Whether the queue still holds all of these requests, as far as can be known now."""
    try:
        for prompt in prompts:
            if prompt.stream_sequence is None or not await bus.holds(REQUESTS, prompt.stream_sequence):
                return False
    except BusError as error:
        log.warning("the queue does not say what it holds", error=str(error))
    return True


async def read_log(bus: Bus, request: Request) -> TokenLog:
    """What the broker still holds of the request's events. Raises BusError."""
    events = [logged.event for logged in await read_events(bus, request)]
    ended = next((event for event in reversed(events) if isinstance(event, RequestEnded)), None)
    return TokenLog([event for event in events if isinstance(event, TokenFrame)], ended)


async def read_events(bus: Bus, request: Request) -> list[LoggedEvent]:
    """The same in the order in which the broker got it. Raises BusError."""
    events = []
    most = max(MAX_LOGGED, EVENTS_PER_TOKEN * request.num_choices * request.stop.max_tokens)
    for message in await bus.read(TOKENS.name, tokens_subject(request.router, request.request_id), most):
        try:
            events.append(LoggedEvent(message.stream_sequence, decode(message.data, LogMessage)))
        except ProtocolError as error:
            log.warning("undecodable event in the log", request_id=request.request_id, error=str(error))
    return events


async def read_end(bus: Bus, request: Request) -> RequestEnded | None:
    """The request's end, if its log has come to that: the last message alone is read. Raises BusError."""
    message = await bus.last(TOKENS.name, tokens_subject(request.router, request.request_id))
    try:
        event: LogMessage | None = None if message is None else decode(message.data, LogMessage)
    except ProtocolError as error:
        log.warning("undecodable event in the log", request_id=request.request_id, error=str(error))
        return None
    return event if isinstance(event, RequestEnded) else None
