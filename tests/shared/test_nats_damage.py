"""Bytes that are lost or changed on the way from the broker: what cannot be read is no answer, and what does not fit
ends the connection. Nobody gets what was not sent, and a request that is sent again is there once."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from headrace_shared.broker import NatsServer
from headrace_shared.bus import Message
from headrace_shared.errors import BusError, OutcomeUnknown
from headrace_shared.nats_bus import NatsBus
from tests.chaos_proxy import ChaosProxy
from tests.patience import PATIENCE_S
from tests.shared.bus_helpers import CONSUMER, SUBJECT, until

pytestmark = pytest.mark.nats


class Damage:
    """`old` becomes `new`, once."""

    def __init__(self, old: bytes, new: bytes) -> None:
        self._old = old
        self._new = new
        self.is_done = False

    def __call__(self, chunk: bytes) -> bytes:
        if self.is_done or self._old not in chunk:
            return chunk
        self.is_done = True
        return chunk.replace(self._old, self._new, 1)


@pytest.fixture
async def proxy(nats_server: NatsServer) -> AsyncIterator[ChaosProxy]:
    async with ChaosProxy(nats_server.port) as proxy:
        yield proxy


@pytest.fixture
async def far_bus(proxy: ChaosProxy) -> AsyncIterator[NatsBus]:
    """Behind the proxy."""
    closed: list[None] = []
    bus = await NatsBus.connect(f"nats://127.0.0.1:{proxy.port}", name="far", on_closed=lambda: closed.append(None))
    yield bus
    await bus.close()
    assert not closed


@pytest.mark.parametrize(
    ("old", "new"),
    [(b'{"stream"', b'{"strea\xff"'), (b'"seq":', b'"sex":'), (b'"seq":', b'"seq";')],
)
async def test_an_answer_that_is_not_readable_is_none(
    bus: NatsBus, far_bus: NatsBus, proxy: ChaosProxy, old: bytes, new: bytes
) -> None:
    proxy.damage = Damage(old, new)
    with pytest.raises(OutcomeUnknown):
        await far_bus.enqueue(SUBJECT, b"x", message_id="1")
    assert await far_bus.enqueue(SUBJECT, b"x", message_id="1")
    assert await bus.num_messages("REQUESTS") == 1


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"hello\r\n", b"hel\r\n"),
        (b"hello\r\n", b"hel\r\nlo\r\n"),
        (b" 5\r\nhello", b" 4\r\nhello"),
        (b" 5\r\nhello", b" -5\r\nhello"),
        (b" 5\r\nhello", b" five\r\nhello"),
        (b" 5\r\nhello", b"\r\nhello"),
        (b"MSG t.a ", b"MSG t.a a b c d "),
    ],
)
async def test_a_message_that_is_not_as_long_as_told_ends_the_connection(
    bus: NatsBus, far_bus: NatsBus, proxy: ChaosProxy, old: bytes, new: bytes
) -> None:
    reconnects: list[None] = []
    far_bus.on_reconnect(lambda: reconnects.append(None))
    got: list[Message] = []
    await far_bus.subscribe("t.*", got.append)
    proxy.damage = damage = Damage(old, new)
    bus.publish("t.a", b"hello")
    await until(lambda: damage.is_done)
    bus.publish("t.b", b"world")
    await until(lambda: reconnects)
    assert not got
    bus.publish("t.a", b"again")
    await until(lambda: got)
    assert [message.data for message in got] == [b"again"]


async def test_a_delivery_that_nobody_could_settle_stays_in_the_queue(
    bus: NatsBus, far_bus: NatsBus, proxy: ChaosProxy
) -> None:
    await bus.enqueue(SUBJECT, b"x", message_id="1")
    proxy.damage = Damage(b"$JS.ACK.", b"$JS.AC\xff.")
    with pytest.raises(BusError):
        await far_bus.pull(CONSUMER, 1.0)
    assert (await bus.queue_depth(CONSUMER)).num_unacknowledged == 1
    async with asyncio.timeout(PATIENCE_S):
        assert await far_bus.enqueue(SUBJECT, b"y", message_id="2")
        delivery = await far_bus.pull(CONSUMER, PATIENCE_S)
    assert delivery is not None and delivery.data == b"y"
