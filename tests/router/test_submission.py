"""What is read of a token log, and what the queue is asked."""

import pytest

from headrace_router.prompt import Prompt
from headrace_router.submission import are_queued, read_log
from headrace_shared.codec import encode
from headrace_shared.errors import BusUnavailable
from headrace_shared.memory_bus import MemoryBroker, MemoryBus
from headrace_shared.messages import Outcome, Request, RequestEnded, TokenFrame
from headrace_shared.subjects import TOKENS, requests_stream, tokens_subject
from tests.scheduler.builders import request


def tell(bus: MemoryBus, wanted: Request, event: TokenFrame | RequestEnded) -> None:
    bus.publish(tokens_subject(wanted.router, wanted.request_id), encode(event))


async def test_the_log_of_long_answers_is_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace_router.submission.MAX_LOGGED", 4)
    bus = MemoryBus(MemoryBroker())
    await bus.ensure_stream(TOKENS)
    wanted = request(num_choices=3, max_tokens=20)
    for index in range(20):
        for choice in range(3):
            frame = TokenFrame(request_id=wanted.request_id, choice=choice, attempt=0, index=index, tokens=(index,))
            tell(bus, wanted, frame)
    tell(bus, wanted, RequestEnded(request_id=wanted.request_id, outcome=Outcome.FINISHED))
    log = await read_log(bus, wanted)
    assert len(log.frames) == 60 and log.ended is not None


async def test_only_what_the_queue_says_it_does_not_hold_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    bus = MemoryBus(MemoryBroker())
    spec = requests_stream(100, 1 << 20)
    await bus.ensure_stream(spec)
    held, lost, never = (Prompt(request(name), []) for name in ("r1", "r2", "r3"))
    held.stream_sequence = await bus.enqueue("requests.m.interactive.0-0", b"x", message_id="r1")
    lost.stream_sequence = held.stream_sequence + 1
    assert await are_queued(bus, [held]) and await are_queued(bus, [])
    assert not await are_queued(bus, [held, lost])
    assert not await are_queued(bus, [never]), "nobody knows where it would be"

    async def away(stream: str, stream_sequence: int) -> bool:
        raise BusUnavailable("away")

    monkeypatch.setattr(bus, "holds", away)
    assert await are_queued(bus, [held, lost]), "nobody can tell now"
