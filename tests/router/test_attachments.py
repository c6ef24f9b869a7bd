"""Who gives up on a client that left, and when."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from headrace_router import attachments as module
from headrace_router.attachments import Attachments
from headrace_router.cancellation import QueuedRequest
from headrace_shared.bus import Message
from headrace_shared.codec import decode, encode
from headrace_shared.memory_bus import MemoryBus
from headrace_shared.messages import (
    Attached,
    Audience,
    CancelReason,
    Request,
    RequestId,
    RouterId,
    SamplingParams,
    StopParams,
)
from headrace_shared.subjects import ALL_ATTACHED, attached_subject
from tests.byte_model import MODEL
from tests.router.support import until

A = RequestId("a" * 32)
B = RequestId("b" * 32)


def queued(request_id: RequestId) -> QueuedRequest:
    request = Request(
        request_id=request_id,
        router=RouterId("router-1"),
        model=MODEL,
        prompt=b"\1\0\0\0",
        sampling=SamplingParams(seed=1),
        stop=StopParams(max_tokens=4),
        audience=Audience.ATTACHED,
    )
    return QueuedRequest(request, 1, has_started=True)


class Bench:
    def __init__(self) -> None:
        self.bus = MemoryBus()
        self.other = MemoryBus(self.bus.broker)
        self.skip_s = 0.0
        self.aborted: list[tuple[RequestId, CancelReason]] = []
        self.told: list[tuple[str, tuple[RequestId, ...]]] = []
        self.attachments = Attachments(self.bus, RouterId("router-1"), self.abort, 0.3, self.clock)

    def clock(self) -> float:
        return asyncio.get_running_loop().time() + self.skip_s

    def abort(self, request: QueuedRequest, reason: CancelReason) -> None:
        self.aborted.append((request.request.request_id, reason))

    def hear(self, message: Message) -> None:
        self.told.append((message.subject, decode(message.data, Attached).request_ids))

    def say_elsewhere(self, *request_ids: RequestId) -> None:
        self.other.publish(attached_subject(RouterId("router-2")), encode(Attached(request_ids=request_ids)))


@pytest.fixture
async def bench(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    for name, seconds in (("PRESENCE_S", 0.5), ("CHECK_S", 0.1), ("PERIOD_S", 0.4)):
        monkeypatch.setattr(module, name, seconds)
    bench = Bench()
    await bench.attachments.start()
    await bench.other.subscribe(ALL_ATTACHED, bench.hear)
    task = asyncio.create_task(bench.attachments.run())
    yield bench
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_clients_are_told_of_at_once_and_again_and_no_more(bench: Bench) -> None:
    with bench.attachments.attached([A]):
        with bench.attachments.attached([A, B]):
            await until(lambda: len(bench.told) == 2, 0.3)
            await until(lambda: len(bench.told) == 3, 2.0)
        await until(lambda: len(bench.told) == 4, 2.0)
    subject = attached_subject(RouterId("router-1"))
    assert bench.told == [(subject, (A,)), (subject, (A, B)), (subject, (A, B)), (subject, (A,))]
    await asyncio.sleep(0.6)
    assert len(bench.told) == 4


async def test_what_a_client_left_ends_after_a_while(bench: Bench) -> None:
    with bench.attachments.attached([A, B]):
        pass
    bench.attachments.leave(queued(A), CancelReason.CLIENT)
    bench.attachments.leave(queued(B), CancelReason.DEADLINE)
    assert bench.aborted == [(B, CancelReason.DEADLINE)], "time that is up is no matter of waiting"
    await asyncio.sleep(0.15)
    assert len(bench.aborted) == 1
    await until(lambda: bench.aborted[1:] == [(A, CancelReason.CLIENT)], 2.5)


async def test_a_client_that_is_here_again_or_elsewhere_keeps_it(bench: Bench) -> None:
    await asyncio.sleep(0.6)
    bench.attachments.leave(queued(A), CancelReason.CLIENT)
    bench.attachments.leave(queued(B), CancelReason.CLIENT)
    bench.other.publish(attached_subject(RouterId("router-2")), b"\xc1")
    with bench.attachments.attached([A]):
        for _ in range(4):
            bench.say_elsewhere(B)
            await asyncio.sleep(0.15)
    assert bench.aborted == []
    await asyncio.sleep(0.7)
    assert bench.aborted == [], "whoever has it now will see to it"


async def test_what_is_known_to_be_elsewhere_is_kept_when_there_is_no_room_for_more(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_ELSEWHERE", 1)
    await asyncio.sleep(0.6)
    bench.attachments.leave(queued(A), CancelReason.CLIENT)
    bench.attachments.leave(queued(B), CancelReason.CLIENT)
    for _ in range(6):
        bench.say_elsewhere(A, B)
        await asyncio.sleep(0.1)
    assert bench.aborted == [(B, CancelReason.CLIENT)]


async def test_after_a_freeze_others_are_heard_first(bench: Bench) -> None:
    """A client went elsewhere while this router was stopped: the router must not end what it has there."""
    await asyncio.sleep(0.6)
    bench.attachments.leave(queued(A), CancelReason.CLIENT)
    bench.skip_s += 30.0
    await asyncio.sleep(0.25)
    assert bench.aborted == []
    bench.say_elsewhere(A)
    await asyncio.sleep(0.45)
    assert bench.aborted == []


async def test_how_many_are_waited_for_is_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LEFT", 1)
    bench.attachments.leave(queued(A), CancelReason.CLIENT)
    bench.attachments.leave(queued(B), CancelReason.CLIENT)
    assert bench.aborted == [(A, CancelReason.CLIENT)]
