"""The broker hangs with its sockets open: it is noticed, no wait is endless, and nothing is sent late."""

import asyncio
import time
from collections.abc import Awaitable

import pytest

from headrace_shared.broker import NatsServer
from headrace_shared.bus import Message
from headrace_shared.errors import BusOverloaded, BusUnavailable, OutcomeUnknown
from headrace_shared.nats_bus import NatsBus
from headrace_shared.subjects import requests_stream
from tests.shared.bus_helpers import CONSUMER, SUBJECT, Connect, pause, until

pytestmark = pytest.mark.nats


async def test_a_hung_broker_is_noticed_and_left_and_found_again(bus: NatsBus, nats_server: NatsServer) -> None:
    await pause(nats_server)
    unknown = asyncio.create_task(bus.enqueue(SUBJECT, b"sent before anyone knew", message_id="1"))
    await until(lambda: not bus.is_connected)
    assert bus.disconnected_for_s > 0.5
    await asyncio.sleep(1.0)  # for the other of the two connections to notice as well
    with pytest.raises(BusUnavailable):
        bus.publish("x", b"")
    with pytest.raises(BusUnavailable):
        await bus.enqueue(SUBJECT, b"ghost", message_id="2")
    with pytest.raises(OutcomeUnknown):
        await asyncio.wait_for(unknown, 30.0)
    await asyncio.sleep(1.0)
    nats_server.resume()
    await until(lambda: bus.is_connected)
    await bus.enqueue(SUBJECT, b"real", message_id="3")
    assert await bus.num_messages("REQUESTS") <= 2


async def test_a_short_pause_costs_no_connection(bus: NatsBus, nats_server: NatsServer) -> None:
    got: list[Message] = []
    reconnects: list[None] = []
    await bus.subscribe("x", got.append)
    bus.on_reconnect(lambda: reconnects.append(None))
    await pause(nats_server)
    bus.publish("x", b"late")
    await until(lambda: not bus.is_connected)
    nats_server.resume()
    await until(lambda: bus.is_connected)
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
    await asyncio.wait(tasks, timeout=30.0)
    assert all(task.cancelled() for task in tasks)


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
    assert time.monotonic() - started < 20.0


async def test_a_blocked_event_loop_is_not_blamed_on_the_broker(bus: NatsBus) -> None:
    reconnects: list[None] = []
    bus.on_reconnect(lambda: reconnects.append(None))
    time.sleep(2.5)  # noqa: ASYNC251 - blocking is the point
    assert bus.is_connected
    await asyncio.sleep(0.1)
    assert bus.is_connected and not reconnects
