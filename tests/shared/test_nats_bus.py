"""What only the real broker can do to us while it runs: refuse, hang up, be too fast, lose consumers."""

import asyncio
import threading

import pytest

from headrace_shared.broker import NatsServer
from headrace_shared.bus import Delivery, Entry, Message
from headrace_shared.errors import BusError, BusRefused, PayloadTooLarge
from headrace_shared.nats_bus import NatsBus
from headrace_shared.subjects import (
    CALLS,
    CANCELS,
    DEAD,
    FLIGHT,
    GROUPS,
    IDEMPOTENCY,
    LEASES,
    LOSSES,
    MIB,
    MODELS,
    TOKENS,
    requests_stream,
)
from tests.shared.bus_helpers import BUCKET, CONSUMER, SUBJECT, Connect, until

pytestmark = pytest.mark.nats


# Refusals and limits.


async def test_a_message_too_large_for_the_broker_costs_nobody_else(bus: NatsBus) -> None:
    got: list[Message] = []
    await bus.subscribe("x", got.append)
    for number in range(10):
        bus.publish("x", str(number).encode())
        with pytest.raises(PayloadTooLarge) as caught:
            await bus.enqueue(SUBJECT, b"x" * 1_500_000, message_id=str(number))
        assert (caught.value.size, caught.value.limit) == (1_500_000, bus.max_payload)
    await bus.enqueue(SUBJECT, b"x" * bus.max_payload, message_id="just", headers={"h": "x" * 60_000})
    await until(lambda: len(got) == 10)


async def test_an_error_of_the_broker_costs_one_connection_and_not_the_bus(bus: NatsBus) -> None:
    got: list[Message] = []
    reconnects: list[None] = []
    await bus.subscribe("x", got.append)
    bus.on_reconnect(lambda: reconnects.append(None))
    client = bus._core._link._client
    assert client is not None
    # Past our check and nats-py's: together above the limit, so the server reports an error and hangs up.
    await client.publish("x", b"x" * (client.max_payload - 10), headers={"h": "x" * 100})
    await until(lambda: reconnects)
    bus.publish("x", b"after")
    await until(lambda: got)
    assert [m.data for m in got] == [b"after"]


async def test_a_limit_that_falls_during_a_restart_is_learnt(bus: NatsBus, nats_server: NatsServer) -> None:
    before = bus.max_payload
    await nats_server.stop()
    smaller = NatsServer(nats_server.data_dir, port=nats_server.port, max_payload=256 * 1024)
    await smaller.start()
    await until(lambda: bus.is_connected)
    assert bus.max_payload < 256 * 1024 < before
    with pytest.raises(PayloadTooLarge):
        bus.publish("x", b"x" * before)
    await smaller.stop()


async def test_a_slow_consumer_is_told_that_it_missed_something_and_goes_on(
    bus: NatsBus, nats_server: NatsServer
) -> None:
    got = 0
    reconnects: list[None] = []
    num_sent = 150

    def on_message(message: Message) -> None:
        nonlocal got
        got += 1

    async def flood() -> None:
        other = await NatsBus.connect(nats_server.url, name="fast", on_closed=lambda: None)
        for _ in range(num_sent):
            while True:
                try:
                    other.publish("x", b"x" * 900_000)
                    break
                except BusError:
                    await asyncio.sleep(0.02)
        await other.close()

    await bus.subscribe("x", on_message)
    bus.on_reconnect(lambda: reconnects.append(None))
    thread = threading.Thread(target=lambda: asyncio.run(flood()))
    thread.start()
    thread.join()  # our event loop reads nothing meanwhile: 135 MB pile up in the broker, which allows 64 MiB
    await until(lambda: reconnects)
    await until(lambda: bus.is_connected)
    before = got
    assert before < num_sent
    bus.publish("x", b"")
    await until(lambda: got > before)
    await bus.enqueue(SUBJECT, b"", message_id="1")


async def test_a_failing_handler_costs_one_message(bus: NatsBus) -> None:
    got: list[bytes] = []

    def on_message(message: Message) -> None:
        got.append(message.data)
        if message.data == b"bad":
            raise ValueError("bad")

    await bus.subscribe("x", on_message)
    bus.publish("x", b"bad")
    bus.publish("x", b"good")
    await until(lambda: len(got) == 2)


async def test_a_broker_with_default_limits_holds_every_stream_and_bucket(bus: NatsBus) -> None:
    for queue_bytes in (1024 * MIB, 2048 * MIB):
        await bus.ensure_stream(requests_stream(100_000, queue_bytes))
    for stream in (TOKENS, CANCELS, DEAD, FLIGHT):
        await bus.ensure_stream(stream)
    for bucket in (LEASES, LOSSES, MODELS, GROUPS, IDEMPOTENCY, CALLS):
        await bus.ensure_bucket(bucket)
    assert await bus.num_messages("TOKENS") == 0 and await bus.entries("MODELS") == []


# Consumers.


async def test_a_deleted_consumer_is_made_again(bus: NatsBus) -> None:
    await bus._streams.must(f"CONSUMER.DELETE.REQUESTS.{CONSUMER.name}")
    await bus.enqueue(SUBJECT, b"one", message_id="1")
    first = await bus.pull(CONSUMER, 5.0)
    assert first is not None and first.data == b"one"
    await bus.acknowledge(first.ack_subject)
    waiting = asyncio.create_task(bus.pull(CONSUMER, 10.0))
    await asyncio.sleep(0.2)
    await bus._streams.must(f"CONSUMER.DELETE.REQUESTS.{CONSUMER.name}")
    await asyncio.sleep(0.2)
    await bus.enqueue(SUBJECT, b"two", message_id="2")
    second = await asyncio.wait_for(waiting, 30.0)
    assert second is not None and second.data == b"two"


async def test_an_acknowledgement_counts_even_if_the_consumer_was_made_anew(bus: NatsBus, connect: Connect) -> None:
    for message_id in ("gone", "new"):
        await bus.enqueue(SUBJECT, b"", message_id=message_id)
        delivery = await bus.pull(CONSUMER, 5.0)
        assert delivery is not None
        await bus._streams.must(f"CONSUMER.DELETE.REQUESTS.{CONSUMER.name}")
        if message_id == "new":
            await bus.ensure_consumer(CONSUMER)
        await (await connect()).acknowledge(delivery.ack_subject)
        assert await bus.num_messages("REQUESTS") == 0


async def test_an_acknowledgement_of_a_lost_queue_takes_nothing_out_of_its_successor(bus: NatsBus) -> None:
    """Not what waits in it, nor what is somebody's already: numbers of messages never come again."""
    await bus.enqueue(SUBJECT, b"", message_id="lost")
    delivery = await bus.pull(CONSUMER, 5.0)
    assert delivery is not None
    await bus._streams.must("STREAM.DELETE.REQUESTS")
    with pytest.raises(BusRefused):
        await bus.acknowledge(delivery.ack_subject)
    await bus.ensure_stream(requests_stream(10, 1 << 20))
    assert await bus.enqueue(SUBJECT, b"", message_id="new") > delivery.stream_sequence
    await bus.acknowledge(delivery.ack_subject)
    held = await bus.pull(CONSUMER, 5.0)
    assert held is not None
    await bus.acknowledge(delivery.ack_subject)
    assert not await bus.delete("REQUESTS", delivery.stream_sequence)
    assert await bus.num_messages("REQUESTS") == 1
    await bus.acknowledge(held.ack_subject)
    assert await bus.num_messages("REQUESTS") == 0


async def test_an_acknowledgement_works_after_its_puller_is_gone(bus: NatsBus, connect: Connect) -> None:
    puller = await connect()
    await bus.enqueue(SUBJECT, b"", message_id="1")
    delivery = await puller.pull(CONSUMER, 5.0)
    assert delivery is not None
    await puller.close()
    bus.in_progress(delivery.ack_subject)
    await bus.acknowledge(delivery.ack_subject)
    assert await bus.num_messages("REQUESTS") == 0


async def test_concurrent_pulls_share_the_queue(bus: NatsBus) -> None:
    pulls = [asyncio.create_task(bus.pull(CONSUMER, 5.0)) for _ in range(50)]
    await asyncio.sleep(0.1)
    await asyncio.gather(*(bus.enqueue(SUBJECT, str(n).encode(), message_id=str(n)) for n in range(50)))
    deliveries: list[Delivery | None] = await asyncio.gather(*pulls)
    assert sorted(int(d.data) for d in deliveries if d is not None) == list(range(50))
    assert all(d is not None and d.num_delivered == 1 for d in deliveries)


async def test_a_watch_survives_the_loss_of_its_bucket(bus: NatsBus) -> None:
    """What is made again counts from the beginning."""
    got: list[tuple[str, bytes | None]] = []
    watch = await bus.watch("B", lambda entry, key: got.append((key, None if entry is None else entry.value)))
    await bus.put("B", "k", b"1")
    await until(lambda: got == [("k", b"1")])
    await bus._streams.must("STREAM.DELETE.KV_B")
    await bus.ensure_bucket(BUCKET)
    await bus.put("B", "new", b"2")
    await until(lambda: got[1:] == [("k", None), ("new", b"2")])
    await watch.close()


async def test_a_watch_that_missed_changes_lists_the_bucket_again(bus: NatsBus) -> None:
    got: list[str] = []
    await bus.put("B", "k", b"")
    watch = await bus.watch("B", lambda entry, key: got.append(f"{'-' if entry is None else '+'}{key}"))
    config = (await bus._streams.must("STREAM.INFO.KV_B"))["config"]
    silent = config | {"republish": None}
    # At the next change it knows, and else when it asks.
    await bus._streams.must("STREAM.UPDATE.KV_B", silent)
    await bus.remove("B", "k")
    await bus.put("B", "silent", b"")
    await bus._streams.must("STREAM.UPDATE.KV_B", config)
    await bus.put("B", "told", b"")
    await until(lambda: got[1:] == ["-k", "+silent", "+told"])
    await bus._streams.must("STREAM.UPDATE.KV_B", silent)
    await bus.remove("B", "silent")
    await until(lambda: got[4:] == ["-silent"])
    await watch.close()


async def test_a_watch_tells_all_that_changes_while_it_begins(bus: NatsBus) -> None:
    for number in range(300):
        await bus.put("B", f"k.{number}", b"0")

    async def change() -> None:
        for number in range(300):
            await bus.put("B", f"k.{number}", b"1")
            if number % 3 == 0:
                await bus.remove("B", f"k.{number}")

    changing = asyncio.create_task(change())
    known: dict[str, bytes] = {}

    def on_change(entry: Entry | None, key: str) -> None:
        if entry is None:
            known.pop(key, None)
        else:
            known[key] = entry.value

    watch = await bus.watch("B", on_change)
    await changing
    await until(lambda: known == {f"k.{number}": b"1" for number in range(300) if number % 3})
    await watch.close()
