"""What only the real broker can do to us: crash, hang, come back, refuse, be too fast."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from headrace_shared.broker import NatsServer
from headrace_shared.bus import Bus, Delivery, Entry, Message
from headrace_shared.errors import BusError, BusOverloaded, BusUnavailable, OutcomeUnknown, PayloadTooLarge
from headrace_shared.messages import Lane
from headrace_shared.nats_bus import NatsBus
from headrace_shared.subjects import BucketSpec, ConsumerSpec, request_subject, requests_stream

pytestmark = pytest.mark.nats

SUBJECT = request_subject("m", Lane.INTERACTIVE, 0)
CONSUMER = ConsumerSpec("REQUESTS", "m-interactive", "requests.m.interactive.*", ack_wait_s=30.0, max_ack_pending=100)
BUCKET = BucketSpec("B", max_bytes=1024 * 1024)

Connect = Callable[..., Awaitable[NatsBus]]


@pytest.fixture
async def connect(nats_server: NatsServer) -> AsyncIterator[Connect]:
    buses: list[NatsBus] = []
    closed: list[None] = []

    async def connect_one(*, ping_interval_s: float = 2.0, request_timeout_s: float = 5.0) -> NatsBus:
        bus = await NatsBus.connect(
            nats_server.url,
            name="test",
            on_closed=lambda: closed.append(None),
            ping_interval_s=ping_interval_s,
            request_timeout_s=request_timeout_s,
        )
        buses.append(bus)
        return bus

    yield connect_one
    nats_server.resume()
    for bus in buses:
        await bus.close()
    assert not closed, "no outage closes a bus for good"


@pytest.fixture
async def bus(connect: Connect) -> NatsBus:
    bus = await connect()
    await bus.ensure_stream(requests_stream(10_000, 100 * 1024 * 1024))
    await bus.ensure_consumer(CONSUMER)
    await bus.ensure_bucket(BUCKET)
    return bus


async def until(condition: Callable[[], object], timeout_s: float = 10.0) -> float:
    """Seconds until it held."""
    started = time.monotonic()
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - conditions of any kind
            await asyncio.sleep(0.01)
    return time.monotonic() - started


async def pause(server: NatsServer) -> None:
    server.pause()
    await asyncio.sleep(0.1)  # all its threads


async def until_enqueued(bus: Bus, message_id: str, timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while True:
            try:
                await bus.enqueue(SUBJECT, message_id.encode(), message_id=message_id)
                return
            except BusError:
                await asyncio.sleep(0.01)


# Crash and restart.


async def test_nothing_confirmed_is_lost_by_a_crash_and_everything_resumes(
    bus: NatsBus, connect: Connect, nats_server: NatsServer
) -> None:
    other = await connect()
    got: list[Message] = []
    reconnects: list[None] = []
    pulled: list[bytes] = []
    await bus.subscribe("x", got.append)
    bus.on_reconnect(lambda: reconnects.append(None))
    revision = await bus.put("B", "k", b"kept")
    held = await bus.enqueue(SUBJECT, b"held", message_id="held")
    delivery = await bus.pull(CONSUMER, 5.0)
    assert delivery is not None and delivery.stream_sequence == held
    await bus.enqueue(SUBJECT, b"waiting", message_id="waiting")
    waiting = await other.pull(CONSUMER, 5.0)
    assert waiting is not None
    other.give_back(waiting.ack_subject, 2.0)

    async def pull_for_ever() -> None:
        while True:
            try:
                pulled_now = await other.pull(CONSUMER, 10.0)
            except BusUnavailable:
                await asyncio.sleep(0.05)
                continue
            if pulled_now is not None:
                pulled.append(pulled_now.data)
                await other.acknowledge(pulled_now.ack_subject)

    puller = asyncio.create_task(pull_for_ever())
    await asyncio.sleep(0.1)
    await nats_server.kill()
    await until(lambda: not bus.is_connected and not other.is_connected, 2.0)
    await asyncio.sleep(1.5)
    assert 1.0 < bus.disconnected_for_s < 5.0
    await nats_server.start()
    await until_enqueued(bus, "new", 5.0)
    await until(lambda: set(pulled) == {b"waiting", b"new"})
    await bus.acknowledge(delivery.ack_subject)
    await until(lambda: bus.is_connected and other.is_connected)
    assert bus.disconnected_for_s == 0.0
    assert await bus.num_messages("REQUESTS") == 0
    assert await bus.get("B", "k") == Entry("k", b"kept", revision)
    assert reconnects
    other.publish("x", b"again")
    await until(lambda: got)
    assert [m.data for m in got] == [b"again"]
    puller.cancel()
    await asyncio.wait([puller])


async def test_work_offered_during_an_outage_is_refused_at_once_and_never_executed(
    bus: NatsBus, nats_server: NatsServer
) -> None:
    got: list[Message] = []
    await bus.subscribe("x", got.append)
    await nats_server.kill()
    await until(lambda: not bus.is_connected, 2.0)
    started = time.monotonic()
    for number in range(100):
        with pytest.raises(BusUnavailable):
            await bus.enqueue(SUBJECT, b"ghost", message_id=f"ghost-{number}")
        with pytest.raises(BusUnavailable):
            bus.publish("x", b"ghost")
    assert time.monotonic() - started < 0.5
    await nats_server.start()
    await until_enqueued(bus, "real")
    await asyncio.sleep(0.3)
    assert await bus.num_messages("REQUESTS") == 1 and got == []


async def test_a_request_under_way_when_the_broker_dies_is_reported_as_unknown(
    bus: NatsBus, nats_server: NatsServer
) -> None:
    await pause(nats_server)
    enqueuing = asyncio.create_task(bus.enqueue(SUBJECT, b"", message_id="1"))
    await asyncio.sleep(0.1)
    await nats_server.kill()
    with pytest.raises(OutcomeUnknown):
        await asyncio.wait_for(enqueuing, 2.0)


async def test_a_waiting_pull_learns_of_the_outage(bus: NatsBus, nats_server: NatsServer) -> None:
    pulling = asyncio.create_task(bus.pull(CONSUMER, 30.0))
    await asyncio.sleep(0.1)
    await nats_server.kill()
    with pytest.raises(BusUnavailable):
        await asyncio.wait_for(pulling, 2.0)


async def test_a_watch_goes_on_after_a_crash_and_tells_what_happened_meanwhile(
    bus: NatsBus, connect: Connect, nats_server: NatsServer
) -> None:
    state: dict[str, bytes] = {}

    def on_change(entry: Entry | None, key: str) -> None:
        if entry is None:
            state.pop(key, None)
        else:
            state[key] = entry.value

    await bus.put("B", "stays", b"1")
    await bus.put("B", "goes", b"1")
    await bus.watch("B", on_change)
    assert state == {"stays": b"1", "goes": b"1"}
    await nats_server.kill()
    await nats_server.start()
    other = await connect()
    await other.remove("B", "goes")
    await other.put("B", "comes", b"1")
    await until(lambda: state == {"stays": b"1", "comes": b"1"})
    await other.put("B", "stays", b"2")
    await until(lambda: state["stays"] == b"2")


async def test_the_first_connection_waits_for_the_broker(nats_server: NatsServer) -> None:
    await nats_server.kill()
    connecting = asyncio.create_task(NatsBus.connect(nats_server.url, name="early", on_closed=lambda: None))
    await asyncio.sleep(0.5)
    await nats_server.start()
    bus = await asyncio.wait_for(connecting, 5.0)
    assert bus.is_connected
    await bus.close()


async def test_the_first_connection_gives_up_in_time(tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(BusUnavailable, match=r"127\.0\.0\.1:1"):
        await NatsBus.connect("nats://127.0.0.1:1", name="x", on_closed=lambda: None, connect_timeout_s=0.5)
    assert time.monotonic() - started < 3.0


async def test_the_first_connection_can_be_cancelled(nats_server: NatsServer) -> None:
    await nats_server.kill()
    for delay_s in (0.0, 0.01, 0.06, 0.2):
        connecting = asyncio.create_task(NatsBus.connect(nats_server.url, name="x", on_closed=lambda: None))
        await asyncio.sleep(delay_s)
        connecting.cancel()
        await asyncio.wait([connecting], timeout=2.0)
        assert connecting.cancelled()


async def test_a_broker_that_refuses_us_closes_the_bus_for_good(tmp_path: Path) -> None:
    server = NatsServer(tmp_path, user="u", password="right")
    await server.start()
    with pytest.raises(BusUnavailable, match="refuses"):
        await NatsBus.connect(server.url, name="x", on_closed=lambda: None, user="u", password="wrong")
    closed: list[None] = []
    bus = await NatsBus.connect(server.url, name="x", on_closed=lambda: closed.append(None), user="u", password="right")
    await server.kill()
    changed = NatsServer(tmp_path, port=server.port, user="u", password="changed")
    await changed.start()
    await until(lambda: closed)
    await asyncio.sleep(0.3)
    assert closed == [None] and not bus.is_connected
    await bus.close()
    await changed.stop()


async def test_the_outcome_of_every_enqueue_is_told_truly_over_many_crashes(
    bus: NatsBus, nats_server: NatsServer
) -> None:
    outcomes: dict[str, type[BaseException] | None] = {}
    stopping = asyncio.Event()

    async def produce(name: str) -> None:
        number = 0
        while not stopping.is_set():
            number += 1
            message_id = f"{name}-{number}"
            try:
                await bus.enqueue(SUBJECT, message_id.encode(), message_id=message_id)
                outcomes[message_id] = None
            except BusError as error:
                outcomes[message_id] = type(error)
                await asyncio.sleep(0.005)

    producers = [asyncio.create_task(produce(name)) for name in "abcd"]
    for _ in range(4):
        await asyncio.sleep(0.3)
        await nats_server.kill()
        await nats_server.start()
    await until(lambda: bus.is_connected)
    await asyncio.sleep(0.2)
    stopping.set()
    await asyncio.wait(producers)
    stored: list[str] = []
    while (delivery := await bus.pull(CONSUMER, 0.5)) is not None:
        stored.append(delivery.data.decode())
        await bus.acknowledge(delivery.ack_subject)
    assert len(stored) == len(set(stored))
    confirmed = {message_id for message_id, error in outcomes.items() if error is None}
    refused = {message_id for message_id, error in outcomes.items() if error is BusUnavailable}
    assert len(confirmed) > 100 and len(refused) > 10
    assert confirmed <= set(stored), "confirmed but lost"
    assert not refused & set(stored), "refused but executed"
    assert set(outcomes.values()) <= {None, BusUnavailable, OutcomeUnknown}


async def test_reconnecting_leaves_no_tasks_behind(bus: NatsBus, nats_server: NatsServer) -> None:
    await bus.subscribe("x", lambda message: None)
    await bus.watch("B", lambda entry, key: None)
    await asyncio.sleep(0.2)
    before = len(asyncio.all_tasks())
    for _ in range(4):
        await nats_server.kill()
        await nats_server.start()
        await until(lambda: bus.is_connected)
    async with asyncio.timeout(5.0):
        while len(asyncio.all_tasks()) > before:  # noqa: ASYNC110 - they end by themselves
            await asyncio.sleep(0.05)


# A broker that hangs.


async def test_a_hung_broker_is_noticed_and_left_and_found_again(bus: NatsBus, nats_server: NatsServer) -> None:
    await pause(nats_server)
    unknown = asyncio.create_task(bus.enqueue(SUBJECT, b"sent before anyone knew", message_id="1"))
    assert await until(lambda: not bus.is_connected, 5.0) < 3.0
    assert 0.5 < bus.disconnected_for_s < 3.0
    with pytest.raises(BusUnavailable):
        bus.publish("x", b"")
    with pytest.raises(BusUnavailable):
        await bus.enqueue(SUBJECT, b"ghost", message_id="2")
    with pytest.raises(OutcomeUnknown):
        await asyncio.wait_for(unknown, 6.0)
    await asyncio.sleep(1.0)
    nats_server.resume()
    assert await until(lambda: bus.is_connected) < 5.0
    await bus.enqueue(SUBJECT, b"real", message_id="3")
    assert await bus.num_messages("REQUESTS") <= 2


async def test_a_short_pause_costs_no_connection(bus: NatsBus, nats_server: NatsServer) -> None:
    got: list[Message] = []
    reconnects: list[None] = []
    await bus.subscribe("x", got.append)
    bus.on_reconnect(lambda: reconnects.append(None))
    await pause(nats_server)
    bus.publish("x", b"late")
    await until(lambda: not bus.is_connected, 5.0)
    nats_server.resume()
    await until(lambda: bus.is_connected, 2.0)
    await until(lambda: got)
    assert reconnects, "others may have been refused meanwhile"


async def test_every_wait_can_be_cancelled_while_the_broker_hangs(bus: NatsBus, nats_server: NatsServer) -> None:
    await bus.enqueue(SUBJECT, b"", message_id="1")
    delivery = await bus.pull(CONSUMER, 5.0)
    assert delivery is not None
    await pause(nats_server)
    waits: list[Awaitable[object]] = [
        bus.enqueue(SUBJECT, b"x" * 500_000, message_id="2"),
        bus.pull(CONSUMER, 10.0),
        bus.acknowledge(delivery.ack_subject),
        bus.get("B", "k"),
        bus.put("B", "k", b""),
        bus.entries("B"),
        bus.watch("B", lambda entry, key: None),
        bus.subscribe("y", lambda message: None),
        bus.ensure_stream(requests_stream(10_000, 100 * 1024 * 1024)),
        bus.num_messages("REQUESTS"),
    ]
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    await asyncio.sleep(0.3)
    assert not any(task.done() for task in tasks)
    for task in tasks:
        task.cancel()
    started = time.monotonic()
    await asyncio.wait(tasks, timeout=5.0)
    assert all(task.cancelled() for task in tasks) and time.monotonic() - started < 0.5


async def test_a_flood_into_a_hung_broker_is_bounded_and_stays_unsent(
    bus: NatsBus, connect: Connect, nats_server: NatsServer
) -> None:
    await pause(nats_server)
    num_accepted = 0
    with pytest.raises(BusOverloaded):
        for _ in range(1000):
            bus.publish("x", b"y" * 900_000)
            num_accepted += 1
            if num_accepted % 10 == 0:
                await asyncio.sleep(0)
    assert num_accepted < 100
    await until(lambda: bus.disconnected_for_s > 4.5)
    nats_server.resume()
    other = await connect()
    got: list[Message] = []
    await other.subscribe("x", got.append)
    await until(lambda: bus.is_connected)
    bus.publish("x", b"fresh")
    await until(lambda: got)
    await asyncio.sleep(0.2)
    assert [m.data for m in got] == [b"fresh"]


async def test_closing_does_not_wait_for_a_hung_broker(connect: Connect, nats_server: NatsServer) -> None:
    bus = await connect()
    await pause(nats_server)
    bus.publish("x", b"y" * 900_000)
    started = time.monotonic()
    await bus.close()
    assert time.monotonic() - started < 3.0


async def test_a_blocked_event_loop_is_not_blamed_on_the_broker(bus: NatsBus) -> None:
    reconnects: list[None] = []
    bus.on_reconnect(lambda: reconnects.append(None))
    for _ in range(2):
        time.sleep(2.5)  # noqa: ASYNC251 - blocking is the point
        assert bus.is_connected
        await asyncio.sleep(0.1)
    assert bus.is_connected and not reconnects


# Refusals and limits.


async def test_a_message_too_large_for_the_broker_costs_nobody_else(bus: NatsBus) -> None:
    got: list[Message] = []
    await bus.subscribe("x", got.append)
    for number in range(10):
        bus.publish("x", str(number).encode())
        with pytest.raises(PayloadTooLarge) as caught:
            await bus.enqueue(SUBJECT, b"x" * 1_500_000, message_id=str(number))
        assert (caught.value.size, caught.value.limit) == (1_500_000, bus.max_payload)
    assert await bus.enqueue(SUBJECT, b"x" * bus.max_payload, message_id="just", headers={"h": "x" * 60_000}) == 1
    await until(lambda: len(got) == 10)


async def test_an_error_of_the_broker_costs_one_connection_and_not_the_bus(bus: NatsBus) -> None:
    got: list[Message] = []
    reconnects: list[None] = []
    await bus.subscribe("x", got.append)
    bus.on_reconnect(lambda: reconnects.append(None))
    client = bus._core._link._client
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
    assert await bus.enqueue(SUBJECT, b"", message_id="1") == 1


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
    second = await asyncio.wait_for(waiting, 5.0)
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


async def test_the_watch_survives_the_loss_of_its_consumer(bus: NatsBus) -> None:
    got: list[str] = []
    watch = await bus.watch("B", lambda entry, key: got.append(key))
    names = (await bus._streams.must("CONSUMER.NAMES.KV_B"))["consumers"]
    assert len(names) == 1
    await bus._streams.must(f"CONSUMER.DELETE.KV_B.{names[0]}")
    await bus.put("B", "k", b"")
    await until(lambda: "k" in got)
    await watch.close()
    async with asyncio.timeout(5.0):
        while (await bus._streams.must("CONSUMER.NAMES.KV_B"))["consumers"]:  # noqa: ASYNC110 - the broker's state
            await asyncio.sleep(0.05)
