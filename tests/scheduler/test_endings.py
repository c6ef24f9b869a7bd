"""The terminal event and the acknowledgement after it."""

import asyncio

import pytest
from msgspec.structs import replace

from headrace_scheduler import endings as module
from headrace_scheduler.decisions import EndedRequest
from headrace_scheduler.endings import MAX_ATTEMPTS, Endings
from headrace_shared import codec
from headrace_shared.messages import Lane, Outcome, Request, RequestEnded
from headrace_shared.record_messages import DeadRequest
from headrace_shared.subjects import DEAD, TOKENS, dead_subject, tokens_subject
from tests.queues import request_subject, whole_lane
from tests.scheduler.shell_builders import MODEL, FlakyBus, prepare, request


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_DELAY_S", 0.001)
    monkeypatch.setattr(module, "MAX_DELAY_S", 0.001)


async def pulled(bus: FlakyBus) -> EndedRequest:
    wanted = request()
    await bus.enqueue(request_subject(MODEL, Lane.INTERACTIVE, 0), codec.encode(wanted), message_id="1")
    delivery = await bus.pull(whole_lane(MODEL, Lane.INTERACTIVE), 1.0)
    assert delivery is not None
    event = RequestEnded(request_id=wanted.request_id, outcome=Outcome.FINISHED)
    return EndedRequest(event, wanted.router, delivery.ack_subject, delivery.stream_sequence)


async def num_events(bus: FlakyBus, wanted: Request) -> int:
    return len(await bus.read(TOKENS.name, tokens_subject(wanted.router, wanted.request_id), 10))


async def ran(endings: Endings, ended: EndedRequest) -> None:
    task = asyncio.create_task(endings.run())
    endings.end(ended)
    await endings.settle(5.0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_the_event_is_stored_then_the_message_acknowledged() -> None:
    bus = FlakyBus()
    await prepare(bus)
    endings = Endings(bus)
    await ran(endings, await pulled(bus))
    assert await num_events(bus, request()) == 1
    assert await bus.num_messages("REQUESTS") == 0
    assert endings.num_pending == 0 and list(endings.ack_subjects()) == []


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("num_failures", [1, 2, MAX_ATTEMPTS - 1])
async def test_failures_are_tried_again_and_the_event_is_stored_once(num_failures: int) -> None:
    bus = FlakyBus()
    await prepare(bus)
    ended = await pulled(bus)
    bus.num_failures = num_failures
    await ran(Endings(bus), ended)
    assert await num_events(bus, request()) == 1
    assert await bus.num_messages("REQUESTS") == 0


@pytest.mark.usefixtures("quick")
async def test_what_was_given_up_is_ended_when_the_queue_offers_it_again() -> None:
    bus = FlakyBus()
    await prepare(bus)
    ended = await pulled(bus)
    bus.num_failures = MAX_ATTEMPTS
    endings = Endings(bus)
    await ran(endings, ended)
    assert await bus.num_messages("REQUESTS") == 1 and endings.num_pending == 0
    assert endings.end_again(ended.event.request_id, ended.ack_subject)
    assert list(endings.ack_subjects()) == [ended.ack_subject]
    task = asyncio.create_task(endings.run())
    await endings.settle(5.0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert await bus.num_messages("REQUESTS") == 0
    assert not endings.end_again(ended.event.request_id, ended.ack_subject)


async def test_settling_is_bounded() -> None:
    bus = FlakyBus()
    await prepare(bus)
    endings = Endings(bus)
    endings.end(await pulled(bus))
    await endings.settle(0.05)
    assert endings.num_pending == 1


@pytest.mark.parametrize("keep", [False, True])
async def test_who_was_given_up_is_kept_with_or_without_the_prompt(keep: bool) -> None:
    bus = FlakyBus()
    await prepare(bus)
    endings = Endings(bus, keep_dead_prompts=keep, wall_clock=lambda: 5.0)
    wanted = request()
    dead = DeadRequest(
        request_id=wanted.request_id,
        router=wanted.router,
        model=MODEL,
        reason="two workers lost",
        num_prompt_tokens=5,
        num_output_tokens=0,
        request=wanted,
    )
    ended = (await pulled(bus))._replace(dead=dead)
    bus.num_failures = 1
    await ran(endings, ended)
    [message] = await bus.read(DEAD.name, dead_subject(MODEL, wanted.request_id), 10)
    kept = codec.decode(message.data, DeadRequest)
    assert kept == replace(dead, died_at=5.0, request=wanted if keep else None)
    assert await num_events(bus, wanted) == 1 and endings.num_dead == 1
