"""The in-process broker's own abilities; the rest is in the contract test."""

import asyncio

import pytest

from headrace_shared.bus import Message
from headrace_shared.errors import BusUnavailable
from headrace_shared.memory_bus import MemoryBroker, MemoryBus
from headrace_shared.memory_store import matches
from headrace_shared.subjects import ConsumerSpec, requests_stream

SUBJECT = "requests.m.batch.0"
CONSUMER = ConsumerSpec("REQUESTS", "m-batch", "requests.m.batch.*", ack_wait_s=30.0, max_ack_pending=10)


async def test_an_outage_refuses_everything_and_keeps_what_is_stored() -> None:
    broker = MemoryBroker()
    bus, other = MemoryBus(broker), MemoryBus(broker)
    await bus.ensure_stream(requests_stream(10, 1000))
    await bus.enqueue(SUBJECT, b"kept", message_id="1")
    got: list[Message] = []
    reconnects: list[None] = []
    await other.subscribe("x", got.append)
    other.on_reconnect(lambda: reconnects.append(None))
    bus.publish("x", b"under way")
    broker.stop()
    assert not bus.is_connected
    for refused in (bus.enqueue(SUBJECT, b"", message_id="2"), bus.pull(CONSUMER, 1.0), bus.num_messages("REQUESTS")):
        with pytest.raises(BusUnavailable):
            await refused
    with pytest.raises(BusUnavailable):
        bus.publish("x", b"")
    await asyncio.sleep(0.01)
    assert got == [] and bus.disconnected_for_s > 0.0
    broker.start()
    assert reconnects == [None] and bus.disconnected_for_s == 0.0
    delivery = await bus.pull(CONSUMER, 1.0)
    assert delivery is not None and delivery.data == b"kept"
    bus.publish("x", b"again")
    await asyncio.sleep(0.01)
    assert [m.data for m in got] == [b"again"]


async def test_a_pull_that_waits_learns_of_the_outage() -> None:
    bus = MemoryBus()
    await bus.ensure_stream(requests_stream(10, 1000))
    pulling = asyncio.create_task(bus.pull(CONSUMER, 30.0))
    await asyncio.sleep(0.01)
    bus.broker.stop()
    with pytest.raises(BusUnavailable):
        await asyncio.wait_for(pulling, 10.0)


@pytest.mark.parametrize(
    ("pattern", "subject", "expected"),
    [
        ("a.b", "a.b", True),
        ("a.*", "a.b", True),
        ("a.*", "a", False),
        ("a.*", "a.b.c", False),
        ("a.>", "a.b.c", True),
        ("a.>", "a", False),
        (">", "a", True),
        ("*.b", "a.b", True),
        ("a.b", "a.c", False),
    ],
)
def test_wildcards_match_as_in_the_broker(pattern: str, subject: str, expected: bool) -> None:
    assert matches(pattern, subject) is expected
