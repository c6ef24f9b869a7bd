"""Cancellations that come live, early, or while nobody listens."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from headrace_router.call_limits import MAX_CHOICES
from headrace_scheduler import cancellations as module
from headrace_scheduler.cancellations import CLOCK_SLACK_S, Cancellations
from headrace_shared import codec
from headrace_shared.bus import Delivery, Message
from headrace_shared.errors import BusUnavailable
from headrace_shared.memory_bus import MemoryBus
from headrace_shared.messages import Cancel, CancelReason, RequestId
from headrace_shared.subjects import cancel_subject
from tests.scheduler.shell_builders import prepare, until

A = RequestId("a" * 32)
B = RequestId("b" * 32)


class CountingBus(MemoryBus):
    num_reads = 0
    num_refusals = 0

    async def read(self, stream: str, subject: str, limit: int, from_sequence: int = 1) -> list[Message]:
        self.num_reads += 1
        if self.num_refusals:
            self.num_refusals -= 1
            raise BusUnavailable("no leader")
        return await super().read(stream, subject, limit, from_sequence)


class Bench:
    def __init__(self) -> None:
        self.bus = CountingBus()
        self.wall = 1000.0
        self.applied: list[Cancel] = []
        self.cancellations = Cancellations(self.bus, self.applied.append, lambda: self.wall)

    def publish(self, cancel: Cancel) -> None:
        MemoryBus(self.bus.broker).publish(cancel_subject(cancel.request_id), codec.encode(cancel))


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    await prepare(bench.bus)
    task = asyncio.create_task(bench.cancellations.run())
    yield bench
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def delivery(published_at: float, num_delivered: int = 1) -> Delivery:
    return Delivery("requests.m.interactive.0", b"", "ack", 1, num_delivered, published_at)


async def test_live_cancellations_are_applied(bench: Bench) -> None:
    await bench.cancellations.open()
    bench.publish(Cancel(request_id=A))
    await until(lambda: [cancel.request_id for cancel in bench.applied] == [A])


async def test_a_request_waits_once_to_be_looked_up(bench: Bench) -> None:
    bench.cancellations.look_up([A, A])
    bench.cancellations.on_reconnect([A, B])
    await until(lambda: bench.bus.num_reads == 2)
    await asyncio.sleep(0.05)
    assert bench.bus.num_reads == 2
    bench.cancellations.look_up([A])
    await until(lambda: bench.bus.num_reads == 3)


async def test_early_ones_are_kept_for_their_request(bench: Bench) -> None:
    await bench.cancellations.open()
    stops = [Cancel(request_id=A, choice=choice, reason=CancelReason.STOP) for choice in range(2)]
    for cancel in stops:
        bench.publish(cancel)
    await until(lambda: len(bench.applied) == 2)
    bench.applied.clear()
    assert await bench.cancellations.before_adding(A, delivery(bench.wall + 2 * CLOCK_SLACK_S)) is None
    bench.cancellations.on_added(A)
    assert bench.applied == stops


async def test_no_tombstone_is_read_for_a_request_that_came_after_we_listened(bench: Bench) -> None:
    await bench.cancellations.open()
    assert await bench.cancellations.before_adding(A, delivery(bench.wall + 2 * CLOCK_SLACK_S)) is None
    assert bench.bus.num_reads == 0


@pytest.mark.parametrize(
    "late", [delivery(1000.0 - 50.0), delivery(1000.0 + 9999.0, num_delivered=2)], ids=["older", "redelivered"]
)
async def test_tombstones_tell_what_was_missed(bench: Bench, late: Delivery) -> None:
    cancel = Cancel(request_id=A, reason=CancelReason.DEADLINE)
    bench.publish(cancel)
    await bench.cancellations.open()
    assert await bench.cancellations.before_adding(A, late) == cancel
    assert await bench.cancellations.before_adding(B, late) is None


async def test_all_held_requests_are_looked_up_after_a_reconnect(bench: Bench) -> None:
    bench.publish(Cancel(request_id=B))
    await bench.cancellations.open()
    bench.cancellations.on_reconnect([A, B])
    await until(lambda: [cancel.request_id for cancel in bench.applied] == [B])


async def test_an_election_of_the_brokers_costs_no_tombstone(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes up to 9 s, in which each question is refused at once."""
    monkeypatch.setattr(module, "RETRY_S", 0.001)
    bench.publish(Cancel(request_id=A))
    bench.bus.num_refusals = 20
    bench.cancellations.look_up([A])
    await until(lambda: [cancel.request_id for cancel in bench.applied] == [A])


async def test_each_choice_that_was_stopped_is_known_to_a_successor(bench: Bench) -> None:
    stops = [Cancel(request_id=A, choice=choice, reason=CancelReason.STOP) for choice in range(MAX_CHOICES)]
    for cancel in stops:
        bench.publish(cancel)
    await bench.cancellations.open()
    assert await bench.cancellations.before_adding(A, delivery(0.0, num_delivered=2)) is None
    bench.applied.clear()
    bench.cancellations.on_added(A)
    assert bench.applied == stops


async def test_what_is_remembered_is_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_REMEMBERED", 10)
    await bench.cancellations.open()
    for number in range(30):
        bench.publish(Cancel(request_id=RequestId(f"{number:032x}")))
    await until(lambda: len(bench.applied) == 30)
    bench.applied.clear()
    for number in range(30):
        bench.cancellations.on_added(RequestId(f"{number:032x}"))
    assert [int(cancel.request_id, 16) for cancel in bench.applied] == list(range(20, 30))


async def test_rubbish_is_dropped(bench: Bench) -> None:
    await bench.cancellations.open()
    bench.bus.publish(cancel_subject(A), b"\xc1")
    bench.publish(Cancel(request_id=A))
    await until(lambda: bench.applied)
