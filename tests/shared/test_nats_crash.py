"""The broker crashes and comes back: nothing confirmed is lost, nothing refused is executed, everything resumes."""

import asyncio
import time
from pathlib import Path

import pytest

from headrace_shared.broker import NatsServer
from headrace_shared.bus import Bus, Entry, Message
from headrace_shared.errors import BusError, BusUnavailable, OutcomeUnknown
from headrace_shared.nats_bus import NatsBus
from tests.patience import PATIENCE_S
from tests.shared.bus_helpers import CONSUMER, SUBJECT, Connect, pause, until

pytestmark = pytest.mark.nats


async def until_enqueued(bus: Bus, message_id: str, timeout_s: float = PATIENCE_S) -> None:
    async with asyncio.timeout(timeout_s):
        while True:
            try:
                await bus.enqueue(SUBJECT, message_id.encode(), message_id=message_id)
                return
            except BusError:
                await asyncio.sleep(0.01)


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
    await until(lambda: not bus.is_connected and not other.is_connected)
    await asyncio.sleep(1.5)
    assert 1.0 < bus.disconnected_for_s < 60.0
    await nats_server.start()
    await until_enqueued(bus, "new")
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
    await until(lambda: not bus.is_connected)
    started = time.monotonic()
    for number in range(100):
        with pytest.raises(BusUnavailable):
            await bus.enqueue(SUBJECT, b"ghost", message_id=f"ghost-{number}")
        with pytest.raises(BusUnavailable):
            bus.publish("x", b"ghost")
    assert time.monotonic() - started < 20.0, "200 calls, none of which has waited"
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
        await asyncio.wait_for(enqueuing, 20.0)


async def test_a_waiting_pull_learns_of_the_outage(bus: NatsBus, nats_server: NatsServer) -> None:
    pulling = asyncio.create_task(bus.pull(CONSUMER, 30.0))
    await asyncio.sleep(0.1)
    await nats_server.kill()
    with pytest.raises(BusUnavailable):
        await asyncio.wait_for(pulling, 20.0)


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
    bus = await asyncio.wait_for(connecting, PATIENCE_S)
    assert bus.is_connected
    await bus.close()


async def test_the_first_connection_gives_up_in_time(tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(BusUnavailable, match=r"127\.0\.0\.1:1"):
        await NatsBus.connect("nats://127.0.0.1:1", name="x", on_closed=lambda: None, connect_timeout_s=0.5)
    assert time.monotonic() - started < 20.0


async def test_the_first_connection_can_be_cancelled(nats_server: NatsServer) -> None:
    await nats_server.kill()
    for delay_s in (0.0, 0.01, 0.06, 0.2):
        connecting = asyncio.create_task(NatsBus.connect(nats_server.url, name="x", on_closed=lambda: None))
        await asyncio.sleep(delay_s)
        connecting.cancel()
        await asyncio.wait([connecting], timeout=2.0)
        assert connecting.cancelled()


async def test_a_broker_that_refuses_us_closes_the_bus_for_good(tmp_path: Path) -> None:
    server = NatsServer(tmp_path, access="authorization {user: u, password: right}")
    await server.start()
    with pytest.raises(BusUnavailable, match="refuses"):
        await NatsBus.connect(server.url, name="x", on_closed=lambda: None, user="u", password="wrong")
    closed: list[None] = []
    bus = await NatsBus.connect(server.url, name="x", on_closed=lambda: closed.append(None), user="u", password="right")
    await server.kill()
    changed = NatsServer(tmp_path, port=server.port, access="authorization {user: u, password: changed}")
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
            await asyncio.sleep(0.005)  # four producers at this pace do not fill the queue

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
    async with asyncio.timeout(30.0):
        while len(asyncio.all_tasks()) > before:  # noqa: ASYNC110 - they end by themselves
            await asyncio.sleep(0.05)
