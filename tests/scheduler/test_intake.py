"""What is taken from the queue, when, and what becomes of messages that nobody can run."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
from msgspec.structs import replace

from headrace_scheduler import intake
from headrace_shared import codec
from headrace_shared.bus import Delivery
from headrace_shared.messages import (
    Audience,
    Cancel,
    CancelReason,
    Lane,
    Outcome,
    Request,
    RequestEnded,
    RequestId,
    RouterId,
    TokenFrame,
    WorkerId,
)
from headrace_shared.record_messages import DeadRequest, LossRecord
from headrace_shared.subjects import DEAD, LOSSES, ConsumerSpec, cancel_subject, dead_subject, queues_of, tokens_subject
from tests.queues import lane_depth
from tests.scheduler.intake_bench import FACTS, Bench
from tests.scheduler.shell_builders import MODEL, request, until


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    await bench.start()
    yield bench
    for task in bench.tasks:
        task.cancel()
    await asyncio.gather(*bench.tasks, return_exceptions=True)


async def test_pulls_only_what_there_is_room_for(bench: Bench) -> None:
    for number in range(1, 31):
        await bench.put(request(number))
    bench.run_intake()
    await asyncio.sleep(0.1)
    assert bench.owned() == [], "without a worker there is no room"
    bench.core.add_worker(WorkerId("w"), FACTS, (), 0.0)
    await until(lambda: bench.core.room() == 0)
    await asyncio.sleep(0.1)
    assert 0 < len(bench.owned()) < 15
    depth = await lane_depth(bench.bus, MODEL, Lane.INTERACTIVE)
    assert depth.num_pending == 30 - len(bench.owned())


@pytest.mark.parametrize(("num_messages", "most"), [(1, 1), (6, 6), (60, 1 + intake.NUM_PULLERS)])
async def test_further_pulls_join_only_where_more_waits(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, num_messages: int, most: int
) -> None:
    bench.core.add_worker(WorkerId("w"), FACTS._replace(max_sequences=64), (), 0.0)
    under_way: Counter[str] = Counter()
    peak = 0
    pull = bench.bus.pull

    async def counted(spec: ConsumerSpec, timeout_s: float) -> Delivery | None:
        nonlocal peak
        under_way[spec.name] += 1
        peak = max(peak, under_way[spec.name])
        try:
            await asyncio.sleep(0.01)  # a real broker takes time
            return await pull(spec, timeout_s)
        finally:
            under_way[spec.name] -= 1

    monkeypatch.setattr(bench.bus, "pull", counted)
    for number in range(num_messages):
        await bench.put(request(number))
    bench.run_intake()
    await until(lambda: len(bench.owned()) == num_messages)
    await asyncio.sleep(0.05)
    assert peak == most


async def test_busy_queues_share_the_pulls(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "NUM_PULLERS", 8)
    bench.core.add_worker(WorkerId("w"), FACTS._replace(max_sequences=256), (), 0.0)
    queues = queues_of(MODEL, Lane.INTERACTIVE, 0)[:2]
    names = [queue.consumer.name for queue in queues]
    pulling: Counter[str] = Counter()
    begun: Counter[str] = Counter()
    most: Counter[str] = Counter()
    pull = bench.bus.pull

    async def counted(spec: ConsumerSpec, timeout_s: float) -> Delivery | None:
        pulling[spec.name] += 1
        begun[spec.name] += 1
        if all(14 < begun[name] < 36 for name in names):  # both are busy, and were before
            most[spec.name] = max(most[spec.name], pulling[spec.name])
        try:
            await asyncio.sleep(0.01)
            return await pull(spec, timeout_s)
        finally:
            pulling[spec.name] -= 1
            bench.intake.on_pass()  # as a scheduling pass does soon after a message is taken

    monkeypatch.setattr(bench.bus, "pull", counted)
    for number in range(80):
        sent = request(number)
        await bench.bus.enqueue(queues[number % 2].subject, codec.encode(sent), message_id=sent.request_id)
    bench.run_intake()
    await until(lambda: len(bench.owned()) == 80)
    assert [most[name] for name in names] == [1 + 8 // 2] * 2


async def test_what_is_offered_again_calls_few_pulls(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not counted as pending, so nobody knows how much of it there is."""
    bench.core.add_worker(WorkerId("w"), FACTS._replace(max_sequences=64), (), 0.0)
    await bench.put(request())
    bench.bus.give_back((await bench.pull()).ack_subject)
    under_way: Counter[str] = Counter()
    pull = bench.bus.pull

    async def counted(spec: ConsumerSpec, timeout_s: float) -> Delivery | None:
        under_way[spec.name] += 1
        try:
            return await pull(spec, timeout_s)
        finally:
            under_way[spec.name] -= 1

    monkeypatch.setattr(bench.bus, "pull", counted)
    bench.run_intake()
    await until(lambda: len(bench.owned()) == 1)
    await asyncio.sleep(0.05)
    assert max(under_way.values()) == 1 + intake.MIN_HELPERS


async def test_a_pass_that_makes_room_tells_the_pulls(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "RETRY_S", 60.0)
    await bench.put(request())
    bench.run_intake()
    await asyncio.sleep(0.05)
    bench.intake.on_pass()
    await asyncio.sleep(0.05)
    assert bench.owned() == [], "still no room"
    bench.core.add_worker(WorkerId("w"), FACTS, (), 0.0)
    bench.intake.on_pass()
    await until(bench.owned)


async def test_pulls_nothing_without_a_leased_worker(bench: Bench) -> None:
    bench.core.add_worker(WorkerId("w"), FACTS, (), 0.0)
    bench.may_pull = False
    await bench.put(request())
    bench.run_intake()
    await asyncio.sleep(0.1)
    assert bench.owned() == []
    bench.may_pull = True
    await until(bench.owned)


async def test_batch_requests_wait_for_interactive_ones(bench: Bench) -> None:
    bench.core.add_worker(WorkerId("w"), FACTS, (), 0.0)
    for number in range(1, 31):
        await bench.put(request(number))
    await bench.put(request(99), Lane.BATCH)
    bench.run_intake()
    await until(lambda: bench.core.room() == 0)
    await asyncio.sleep(0.3)
    assert request(99).request_id not in bench.owned()


async def test_a_batch_request_is_taken_when_nobody_waits(bench: Bench) -> None:
    bench.core.add_worker(WorkerId("w"), FACTS, (), 0.0)
    await bench.put(request(99), Lane.BATCH)
    bench.run_intake()
    await until(bench.owned)


async def test_what_a_stopped_intake_still_gets_goes_back(bench: Bench) -> None:
    bench.core.add_worker(WorkerId("w"), FACTS, (), 0.0)
    task = bench.run_intake()
    await asyncio.sleep(0.05)
    bench.intake.stop()
    await bench.put(request())
    await asyncio.wait_for(task, 3.0)
    assert bench.owned() == []
    assert (await bench.pull()).num_delivered == 2


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        codec.encode(Cancel(request_id=RequestId("a" * 32))),
        codec.encode(replace(request(), request_id=RequestId("*"))),
        codec.encode(replace(request(), router=RouterId("a.b"))),
    ],
    ids=["empty", "rubbish", "other-message", "request-id", "router-id"],
)
async def test_unreadable_messages_are_taken_out(bench: Bench, payload: bytes) -> None:
    await bench.put(payload)
    await bench.intake.take(await bench.pull())
    assert await bench.num_queued() == 0
    assert bench.owned() == [] and bench.intake.num_refused == 1


@pytest.mark.parametrize(
    "bad",
    [
        replace(request(), prompt=b""),
        replace(request(), prompt=b"abc"),
        replace(request(), num_choices=0),
        replace(request(), num_choices=100_000),
        replace(request(), model="other"),
        request(max_tokens=0),
    ],
    ids=["no-prompt", "odd-prompt", "no-choice", "many-choices", "model", "no-tokens"],
)
async def test_unusable_requests_end_as_failed(bench: Bench, bad: Request) -> None:
    await bench.put(bad)
    await bench.intake.take(await bench.pull())
    await bench.endings.settle(2.0)
    assert [event.outcome for event in await bench.endings_of(bad)] == [Outcome.FAILED]
    assert await bench.num_queued() == 0


async def test_a_request_that_no_message_could_describe_is_refused(bench: Bench) -> None:
    long = request(num_prompt=100_000, max_tokens=200_000)
    await bench.put(long)
    await bench.intake.take(await bench.pull())
    await bench.endings.settle(2.0)
    assert [event.code for event in await bench.endings_of(long)] == ["context_length_exceeded"]


async def test_a_redelivered_request_continues_from_the_token_log(bench: Bench) -> None:
    wanted = request(num_choices=2)
    await bench.put(wanted)
    bench.bus.give_back((await bench.pull()).ack_subject)
    frame = TokenFrame(request_id=wanted.request_id, choice=1, attempt=4, index=0, tokens=(7, 8))
    bench.bus.publish(tokens_subject(wanted.router, wanted.request_id), codec.encode(frame))
    await asyncio.sleep(0)
    await bench.intake.take(await bench.pull())
    bench.core.add_worker(WorkerId("w"), FACTS, (), 0.0)
    admissions = bench.core.schedule(0.0).credits[WorkerId("w")].admissions
    for admission in admissions:
        if admission.choice == 1:
            assert admission.attempt > 4
            assert codec.unpack_ids(admission.output).tolist() == [7, 8]
    assert admissions


async def test_what_took_longer_than_the_queue_waits_is_left_to_others(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A freeze, or a slow broker, between the pull and the end of what is to be read first."""
    wanted = request()
    await bench.put(wanted)
    bench.bus.give_back((await bench.pull()).ack_subject)
    read = bench.bus.read

    async def frozen(*args: Any) -> Any:
        bench.skipped_s += intake.MAX_TAKE_S + 0.1
        return await read(*args)

    delivery = await bench.pull()
    with monkeypatch.context() as patch:
        patch.setattr(bench.bus, "read", frozen)
        await bench.intake.take(delivery)
    assert bench.owned() == [] and await bench.num_queued() == 1
    await bench.intake.take(delivery)
    assert bench.owned() == [wanted.request_id]


async def test_a_redelivered_request_is_as_suspect_as_it_was(bench: Bench) -> None:
    bench.core.add_worker(WorkerId("worker-1"), FACTS, (), 0.0)
    wanted = request()
    await bench.put(wanted)
    bench.bus.give_back((await bench.pull()).ack_subject)
    record = LossRecord(num_losses=1, suspicion=4, reasons=("worker-0: failed",))
    await bench.bus.put(LOSSES.name, wanted.request_id, codec.encode(record))
    await bench.intake.take(await bench.pull())
    bench.core.schedule(0.0)
    assert bench.core.gauges().num_trials == 1


async def test_a_redelivered_request_that_has_ended_is_only_acknowledged(bench: Bench) -> None:
    wanted = request()
    await bench.put(wanted)
    bench.bus.give_back((await bench.pull()).ack_subject)
    event = RequestEnded(request_id=wanted.request_id, outcome=Outcome.FINISHED)
    bench.bus.publish(tokens_subject(wanted.router, wanted.request_id), codec.encode(event))
    await bench.intake.take(await bench.pull())
    assert bench.owned() == [] and await bench.num_queued() == 0
    assert len(await bench.endings_of(wanted)) == 1


async def test_a_request_that_ended_here_is_acknowledged_again(bench: Bench) -> None:
    wanted = request()
    await bench.put(wanted)
    delivery = await bench.pull()
    await bench.intake.take(delivery)
    bench.core.cancel(wanted.request_id, None, CancelReason.CLIENT, 0.0)
    assert len(bench.core.schedule(0.0).ended) == 1
    bench.bus.give_back(delivery.ack_subject)
    await bench.intake.take(await bench.pull())
    assert await bench.num_queued() == 0 and bench.owned() == []


async def test_a_request_that_comes_back_too_often_fails(bench: Bench) -> None:
    wanted = request()
    await bench.put(wanted)
    for _ in range(3):
        bench.bus.give_back((await bench.pull()).ack_subject)
    await bench.intake.take(await bench.pull())
    [ended] = bench.core.schedule(0.0).ended
    bench.endings.end(ended)
    await bench.endings.settle(2.0)
    assert [event.outcome for event in await bench.endings_of(wanted)] == [Outcome.FAILED]
    [dead] = await bench.bus.read(DEAD.name, dead_subject(MODEL, wanted.request_id), 2)
    assert codec.decode(dead.data, DeadRequest).reason == "taken from the queue 4 times"
    assert await bench.num_queued() == 0 and bench.owned() == []


async def test_deliveries_that_lost_workers_explain_do_not_count(bench: Bench) -> None:
    """Schedulers leave what they hold to peers when they have no worker left."""
    wanted = request()
    await bench.put(wanted)
    for _ in range(3):
        bench.bus.give_back((await bench.pull()).ack_subject)
    await bench.bus.put(LOSSES.name, wanted.request_id, codec.encode(LossRecord(num_losses=1, suspicion=1)))
    await bench.intake.take(await bench.pull())
    assert bench.core.schedule(0.0).ended == [] and bench.owned() != []


async def test_a_cancellation_that_came_first_is_applied(bench: Bench) -> None:
    wanted = request()
    bench.bus.publish(cancel_subject(wanted.request_id), codec.encode(Cancel(request_id=wanted.request_id)))
    await until(lambda: bench.cancels)
    bench.cancels.clear()
    await bench.put(wanted)
    await bench.intake.take(await bench.pull())
    assert [cancel.request_id for cancel in bench.cancels] == [wanted.request_id]


async def test_what_is_too_late_or_was_cancelled_never_reaches_a_worker(bench: Bench) -> None:
    late = replace(request(1), timeout_s=60.0)
    forsaken = replace(request(2), audience=Audience.ROUTER)
    cancelled = request(3)
    fine = replace(request(4), timeout_s=60.0, audience=Audience.ROUTER)
    await asyncio.sleep(0.6)  # their router would have been heard
    for wanted in (late, forsaken, cancelled, fine):
        await bench.put(wanted)
    await bench.bus.enqueue(
        cancel_subject(cancelled.request_id), codec.encode(Cancel(request_id=cancelled.request_id)), message_id="c"
    )
    for age_s in (60.0, 5.0, 0.0, 0.0):
        delivery = await bench.pull()
        await bench.intake.take(delivery._replace(published_at=delivery.published_at - age_s))
    assert bench.owned() == [fine.request_id]
    await until(lambda: not bench.endings.num_pending)
    for wanted, outcome, code in (
        (late, Outcome.EXPIRED, "timeout"),
        (forsaken, Outcome.CANCELLED, ""),
        (cancelled, Outcome.CANCELLED, ""),
    ):
        assert [(event.outcome, event.code) for event in await bench.endings_of(wanted)] == [(outcome, code)]
    assert await bench.num_queued() == 1
