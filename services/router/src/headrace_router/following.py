"""Finds requests that another router, or an earlier connection here, has queued: their tokens up to now and after."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack

from headrace_router.inflight import InFlightTable, Mailbox, event_of
from headrace_router.prompt import Prompt
from headrace_router.submission import read_events
from headrace_shared.bus import Bus, Message
from headrace_shared.errors import InvalidRequest
from headrace_shared.messages import LogMessage, RequestEnded, TokenFrame
from headrace_shared.subjects import REQUESTS, tokens_subject

BATCH_EVENTS = 128
"""A long log does not hold up the streams of others: so many events, then it is their turn."""


async def follow(
    bus: Bus, prompts: Sequence[Prompt], table: InFlightTable, mailbox: Mailbox, sources: AsyncExitStack
) -> AsyncIterator[Sequence[LogMessage]]:
    """What the log holds, in batches; what comes later goes to `mailbox`, until `sources` is closed. Raises BusError,
    and InvalidRequest if an answer is neither there nor in the making."""
    for prompt in prompts:
        prompt.may_be_queued = prompt.has_started = True
        await _listen(bus, prompt, table, mailbox, sources)
    logged = [entry for prompt in prompts for entry in await read_events(bus, prompt.request)]
    logged.sort(key=lambda entry: entry.position)
    _check_whole(prompts, (entry.event for entry in logged))
    ended = {entry.event.request_id for entry in logged if isinstance(entry.event, RequestEnded)}
    for prompt in prompts:
        prompt.has_ended = prompt.request.request_id in ended
    for start in range(0, len(logged), BATCH_EVENTS):
        yield [entry.event for entry in logged[start : start + BATCH_EVENTS]]
        await asyncio.sleep(0)
    for prompt in prompts:
        if prompt.is_complete or prompt.has_ended or prompt.stream_sequence is None:
            continue
        if await bus.holds(REQUESTS, prompt.stream_sequence):
            continue
        # It has ended; perhaps only just now.
        late = [entry.event for entry in await read_events(bus, prompt.request)]
        if not any(isinstance(event, RequestEnded) for event in late):
            raise _expired()
        yield late


def _check_whole(prompts: Sequence[Prompt], events: Iterable[LogMessage]) -> None:
    """A log that has lost its beginning, by age or with its broker, tells nothing: text and ends depend on all. It
    begins in the prompt where that is scored."""
    first = {
        (prompt.request.request_id, choice): cursor.next_index
        for prompt in prompts
        for choice, cursor in enumerate(prompt.cursors)
    }
    for event in events:
        if isinstance(event, TokenFrame):
            expected = first.pop((event.request_id, event.choice), None)
            if expected is not None and event.index > expected:
                raise _expired()


def _expired() -> InvalidRequest:
    return InvalidRequest("The answer is not kept any more.", code="answer_expired")


async def _listen(bus: Bus, prompt: Prompt, table: InFlightTable, mailbox: Mailbox, sources: AsyncExitStack) -> None:
    """The table hears only what was queued here."""
    request = prompt.request
    if request.router == table.router:
        return

    def on_message(message: Message) -> None:
        event = event_of(message)
        if event is not None:
            mailbox.put(event)

    subscription = await bus.subscribe(tokens_subject(request.router, request.request_id), on_message)
    sources.push_async_callback(subscription.close)
