"""One contract, two buses: each test runs against the real broker and against its in-process twin."""

import asyncio
import time

import pytest

from headrace_shared.bus import Bus, Delivery, Message
from headrace_shared.errors import BusRefused, BusUnavailable, PayloadTooLarge, QueueFull
from headrace_shared.messages import Lane
from headrace_shared.subjects import ConsumerSpec, requests_stream
from tests.queues import request_subject
from tests.shared.bus_helpers import BUCKET, CONSUMER, SUBJECT, Pair, until

QUICK = CONSUMER._replace(ack_wait_s=1.0)


async def queue(bus: Bus, consumer: ConsumerSpec = QUICK, max_messages: int = 100) -> None:
    await bus.ensure_stream(requests_stream(max_messages, 10 * 1024 * 1024))
    await bus.ensure_consumer(consumer)


async def pull(bus: Bus, consumer: ConsumerSpec = QUICK) -> Delivery:
    delivery = await bus.pull(consumer, 30.0)
    assert delivery is not None
    return delivery


# Core messages.


async def test_a_subscriber_gets_messages_in_order_with_headers(pair: Pair) -> None:
    got: list[Message] = []
    await pair.a.subscribe("tok.*", got.append)
    for number in range(100):
        pair.b.publish(f"tok.{number % 3}", str(number).encode(), {"n": str(number)} if number % 2 else None)
    await until(lambda: len(got) == 100)
    assert [m.data for m in got] == [str(n).encode() for n in range(100)]
    assert got[1].subject == "tok.1" and got[1].headers == {"n": "1"} and got[2].headers == {}


async def test_a_subscriber_gets_nothing_of_other_subjects_nor_after_close(pair: Pair) -> None:
    got: list[Message] = []
    rest: list[Message] = []
    subscription = await pair.a.subscribe("x.*", got.append)
    await pair.a.subscribe("x.>", rest.append)
    pair.b.publish("x.y.z", b"")
    pair.b.publish("y.x", b"")
    pair.b.publish("x.y", b"yes")
    await until(lambda: len(rest) == 2)
    assert [m.data for m in got] == [b"yes"]
    await subscription.close()
    pair.b.publish("x.y", b"no")
    await until(lambda: len(rest) == 3)
    assert [m.data for m in got] == [b"yes"]


async def test_publishing_does_not_call_the_handler_before_it_returns(pair: Pair) -> None:
    got: list[Message] = []
    await pair.a.subscribe("x", got.append)
    pair.a.publish("x", b"")
    assert got == []
    await until(lambda: got)


async def test_the_largest_payload_passes_with_large_headers_and_one_byte_more_is_refused(pair: Pair) -> None:
    got: list[Message] = []
    await pair.a.subscribe("big", got.append)
    headers = {"h": "x" * 60_000}
    pair.b.publish("big", b"x" * pair.b.max_payload, headers)
    await until(lambda: got)
    assert len(got[0].data) == pair.b.max_payload and got[0].headers == headers
    with pytest.raises(PayloadTooLarge):
        pair.b.publish("big", b"x" * (pair.b.max_payload + 1))
    with pytest.raises(PayloadTooLarge):
        pair.b.publish("big", b"", {"h": "x" * 70_000})
    await queue(pair.b)
    with pytest.raises(PayloadTooLarge):
        await pair.b.enqueue(SUBJECT, b"x" * (pair.b.max_payload + 1), message_id="1")
    pair.b.publish("big", b"still here")
    await until(lambda: len(got) == 2)


async def test_a_connected_bus_says_so_and_a_closed_one_refuses(pair: Pair) -> None:
    assert pair.a.is_connected and pair.a.disconnected_for_s == 0.0
    await pair.a.close()
    await pair.a.close()
    assert not pair.a.is_connected
    with pytest.raises(BusUnavailable):
        pair.a.publish("x", b"")
    with pytest.raises(BusUnavailable):
        await pair.a.enqueue(SUBJECT, b"", message_id="1")
    with pytest.raises(BusUnavailable):
        await pair.a.subscribe("x", lambda message: None)


async def test_closing_sends_what_is_queued(pair: Pair) -> None:
    got: list[Message] = []
    await pair.a.subscribe("x", got.append)
    for _ in range(500):
        pair.b.publish("x", b"y" * 100)
    await pair.b.close()
    await until(lambda: len(got) == 500)


@pytest.mark.parametrize("subject", ["", "a b", "a\r\nPUB x 1", "a..b", "a.", ".a", "a.*", "a.>"])
async def test_a_malformed_subject_is_refused_before_it_reaches_the_wire(pair: Pair, subject: str) -> None:
    bus = pair.a
    await bus.ensure_bucket(BUCKET)
    with pytest.raises(ValueError):
        bus.publish(subject, b"")
    with pytest.raises(ValueError):
        await bus.enqueue(subject, b"", message_id="1")
    with pytest.raises(ValueError):
        await bus.put("B", subject, b"")
    assert bus.is_connected


@pytest.mark.parametrize("headers", [{"": "v"}, {"a:b": "v"}, {"a": "v\r\nb: c"}, {"a\n": "v"}])
async def test_malformed_headers_are_refused_before_they_reach_the_wire(pair: Pair, headers: dict[str, str]) -> None:
    bus = pair.a
    await queue(bus)
    with pytest.raises(ValueError):
        bus.publish("x", b"", headers)
    with pytest.raises(ValueError):
        await bus.enqueue(SUBJECT, b"", message_id="1", headers=headers)
    assert await bus.num_messages("REQUESTS") == 0


# Work queues.


async def test_a_queue_delivers_once_until_acknowledged_by_anyone(pair: Pair) -> None:
    await queue(pair.a)
    before = time.time()
    first = await pair.a.enqueue(SUBJECT, b"one", message_id="1", headers={"t": "v"})
    second = await pair.a.enqueue(SUBJECT, b"two", message_id="2")
    assert second == first + 1
    one, two = await pull(pair.a), await pull(pair.b)
    assert (one.data, one.stream_sequence, one.num_delivered, one.subject) == (b"one", first, 1, SUBJECT)
    assert (two.data, two.stream_sequence, two.num_delivered) == (b"two", second, 1)
    assert (one.num_pending, two.num_pending) == (1, 0)
    assert abs(one.published_at - before) < 5.0
    told = pair.b.published_at(one.ack_subject)
    assert told == pytest.approx(one.published_at, abs=0.01) and pair.b.published_at("") is None
    assert await pair.a.queue_depth(QUICK) == (0, 2, 2)
    await pair.b.acknowledge(one.ack_subject)
    await pair.a.acknowledge(two.ack_subject)
    assert await pair.a.num_messages("REQUESTS") == 0
    assert (await pair.b.queue_depth(QUICK))[:2] == (0, 0)


async def test_acknowledging_twice_is_no_error(pair: Pair) -> None:
    await queue(pair.a)
    await pair.a.enqueue(SUBJECT, b"", message_id="1")
    delivery = await pull(pair.a)
    await pair.a.acknowledge(delivery.ack_subject)
    await pair.b.acknowledge(delivery.ack_subject)


async def test_the_same_message_id_is_stored_once(pair: Pair) -> None:
    await queue(pair.a)
    first = await pair.a.enqueue(SUBJECT, b"", message_id="same")
    assert await pair.b.enqueue(SUBJECT, b"", message_id="same") == first
    assert await pair.a.num_messages("REQUESTS") == 1


async def test_a_full_queue_refuses_and_takes_again_when_there_is_room(pair: Pair) -> None:
    await queue(pair.a, max_messages=2)
    await pair.a.enqueue(SUBJECT, b"1", message_id="1")
    await pair.a.enqueue(SUBJECT, b"2", message_id="2")
    with pytest.raises(QueueFull):
        await pair.a.enqueue(SUBJECT, b"3", message_id="3")
    delivery = await pull(pair.a)
    assert delivery.data == b"1"
    await pair.a.acknowledge(delivery.ack_subject)
    await pair.a.enqueue(SUBJECT, b"3", message_id="3")


async def test_a_queue_is_full_in_bytes_too(pair: Pair) -> None:
    await pair.a.ensure_stream(requests_stream(1000, 200_000))
    await pair.a.enqueue(SUBJECT, b"x" * 150_000, message_id="1")
    with pytest.raises(QueueFull):
        await pair.a.enqueue(SUBJECT, b"x" * 150_000, message_id="2")


async def test_pull_waits_for_a_message_and_gives_up_in_time(pair: Pair) -> None:
    await queue(pair.a)
    started = time.monotonic()
    assert await pair.a.pull(QUICK, 0.3) is None
    assert 0.25 < time.monotonic() - started < 20.0
    assert await pair.a.pull(QUICK, 0.0) is None
    waiting = asyncio.create_task(pull(pair.a))
    await asyncio.sleep(0.05)
    await pair.b.enqueue(SUBJECT, b"x", message_id="1")
    assert (await waiting).data == b"x"


async def test_closing_ends_a_pull_that_waits(pair: Pair) -> None:
    await queue(pair.a)
    pulling = asyncio.create_task(pair.a.pull(QUICK, 30.0))
    await asyncio.sleep(0.1)
    await pair.a.close()
    with pytest.raises(BusUnavailable):
        await asyncio.wait_for(pulling, 20.0)


async def test_an_unsettled_message_is_offered_again_after_the_ack_wait(pair: Pair) -> None:
    await queue(pair.a)
    await pair.a.enqueue(SUBJECT, b"x", message_id="1")
    first = await pull(pair.a)
    started = time.monotonic()
    second = await pull(pair.b)
    assert 0.8 < time.monotonic() - started < 20.0
    assert (second.stream_sequence, second.num_delivered) == (first.stream_sequence, 2)


async def test_what_settles_no_message_is_sent_nowhere(pair: Pair) -> None:
    """It may have passed through the hands of whoever wants something said in our name, or us dead."""
    await queue(pair.a)
    heard: list[Message] = []
    await pair.b.subscribe("x.*", heard.append)
    digits = "9" * 400
    for subject in ("", "x.y", "a b", "x.>", "$JS.ACK.REQUESTS.c.1.1", f"$JS.ACK.REQUESTS.c.1.1.1.{digits}.0"):
        assert pair.a.published_at(subject) is None
        pair.a.in_progress(subject)
        pair.a.give_back(subject)
        with pytest.raises(BusRefused):
            await pair.a.acknowledge(subject)
    await pair.a.enqueue(SUBJECT, b"real", message_id="real")
    assert (await pull(pair.a)).data == b"real" and heard == []


async def test_in_progress_restarts_the_ack_wait(pair: Pair) -> None:
    await queue(pair.a)
    await pair.a.enqueue(SUBJECT, b"x", message_id="1")
    delivery = await pull(pair.a)
    for _ in range(6):
        pair.a.in_progress(delivery.ack_subject)
        assert await pair.b.pull(QUICK, 0.3) is None
    await pair.a.acknowledge(delivery.ack_subject)


async def test_a_message_given_back_comes_at_once_or_after_its_delay(pair: Pair) -> None:
    await queue(pair.a, CONSUMER)
    await pair.a.enqueue(SUBJECT, b"x", message_id="1")
    pair.a.give_back((await pull(pair.a, CONSUMER)).ack_subject)
    started = time.monotonic()
    again = await pull(pair.b, CONSUMER)
    assert again.num_delivered == 2 and time.monotonic() - started < CONSUMER.ack_wait_s - 5.0
    pair.b.give_back(again.ack_subject, 1.5)
    assert await pair.a.pull(CONSUMER, 0.2) is None
    assert (await pull(pair.a, CONSUMER)).num_delivered == 3
    assert time.monotonic() - started >= 1.5


async def test_a_cancelled_pull_loses_nothing(pair: Pair) -> None:
    await queue(pair.a, CONSUMER)
    for number in range(30):
        await pair.b.enqueue(SUBJECT, str(number).encode(), message_id=str(number))
    got: list[bytes] = []

    async def take() -> None:
        delivery = await pair.a.pull(CONSUMER, 1.0)
        if delivery is not None:
            got.append(delivery.data)
            await asyncio.shield(pair.a.acknowledge(delivery.ack_subject))

    for step in range(40):  # cancelled earlier and later, so that every moment is met
        task = asyncio.create_task(take())
        await asyncio.sleep(0.0001 * step)
        task.cancel()
        await asyncio.wait([task])
    started = time.monotonic()
    while len(got) < 30:
        await asyncio.wait_for(take(), 20.0)
    assert sorted(map(int, got)) == list(range(30))
    assert time.monotonic() - started < CONSUMER.ack_wait_s - 5.0, "given back, not left to the ack wait"


async def test_queue_depth_counts_pending_and_unacknowledged(pair: Pair) -> None:
    await pair.a.ensure_stream(requests_stream(100, 1024 * 1024))
    for number in range(3):
        await pair.a.enqueue(SUBJECT, b"", message_id=str(number))
    await pair.a.enqueue(request_subject("other", Lane.BATCH, 0), b"", message_id="other")
    assert await pair.a.queue_depth(QUICK) == (3, 0, 0)
    await pull(pair.a)
    assert await pair.b.queue_depth(QUICK) == (2, 1, 1)


async def test_a_queued_message_can_be_deleted_once(pair: Pair) -> None:
    await queue(pair.a)
    sequence = await pair.a.enqueue(SUBJECT, b"", message_id="1")
    assert await pair.b.delete("REQUESTS", sequence)
    assert not await pair.a.delete("REQUESTS", sequence)
    assert await pair.a.pull(QUICK, 0.1) is None


async def test_ensuring_again_changes_limits_and_keeps_messages(pair: Pair) -> None:
    await queue(pair.a, max_messages=1)
    await pair.a.enqueue(SUBJECT, b"x", message_id="1")
    await queue(pair.b, max_messages=2)
    await pair.b.enqueue(SUBJECT, b"y", message_id="2")
    assert (await pull(pair.a)).data == b"x"
