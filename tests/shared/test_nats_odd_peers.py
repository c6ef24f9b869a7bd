"""What another user of the broker may store or send, in bytes that ours never would: it costs nobody but himself."""

import asyncio

import pytest

from headrace_shared.broker import NatsServer
from headrace_shared.bus import Message
from headrace_shared.bus_rules import MAX_SUBJECT_BYTES
from headrace_shared.errors import BusRefused
from headrace_shared.nats_api import JetStreamApi
from headrace_shared.nats_bus import NatsBus
from headrace_shared.nats_reading import StreamReader
from tests.shared.bus_helpers import SUBJECT, until

pytestmark = pytest.mark.nats


async def tell(server: NatsServer, lines: bytes) -> None:
    """As raw bytes, and returns when the broker has taken them."""
    reader, writer = await asyncio.open_connection(server.host, server.port)
    await reader.readline()
    writer.write(b'CONNECT {"verbose": false, "headers": true}\r\n' + lines + b"PING\r\n")
    await reader.readuntil(b"PONG\r\n")
    writer.close()


def with_headers(subject: bytes, headers: bytes) -> bytes:
    return b"HPUB %b %d %d\r\n%bx\r\n" % (subject, len(headers), len(headers) + 1, headers)


@pytest.mark.parametrize("odd", [b"\xff", b"a\x0bb", b"\xc2\xa0", b"a" * 3000])
async def test_a_subject_of_any_bytes_costs_no_connection(bus: NatsBus, nats_server: NatsServer, odd: bytes) -> None:
    got: list[Message] = []
    reconnects: list[None] = []
    bus.on_reconnect(lambda: reconnects.append(None))
    await bus.subscribe("tokens.r.*", got.append)
    await tell(nats_server, b"PUB tokens.r.%b 1\r\nx\r\nPUB tokens.r.a 1\r\ny\r\n" % odd)
    await until(lambda: [message.data for message in got][-1:] == [b"y"])
    assert len(got) == 2 and not reconnects


@pytest.mark.parametrize(
    "lines",
    [
        with_headers(b"$KV.B.k.odd", b"NATS/1.0\r\nK\xff: \xfe\r\n\r\n"),
        with_headers(b"$KV.B.k.odd", b"NATS/1.0\r\nStatus: 404\r\n\r\n"),
        with_headers(b"$KV.B.k.odd", b"NATS/1.0\r\nStatus: 503\r\n\r\n"),
        with_headers(b"$KV.B.k.odd", b"NATS/1.0 404 No Messages\r\n\r\n"),
        with_headers(b"$KV.B.k.odd", b"NATS/1.0 204 EOB\r\nNats-Num-Pending: 0\r\n\r\n"),
        with_headers(b"$KV.B.k.odd", b"NATS/1.0\r\nNats-Sequence: z\r\nNats-Subject: $KV.B.k.1\r\n\r\n"),
        with_headers(b"$KV.B.k.odd", b"\x00\xff\n\n\r"),
        with_headers(b"$KV.B.k.odd", b""),
        b"PUB $KV.B.k.\xff 1\r\nx\r\n",
        b"PUB $KV.B.k.a\x0bb 1\r\nx\r\n",
    ],
    ids=["bytes", "404", "503", "404 line", "204 line", "numbers", "rubbish", "none", "key", "blank key"],
)
async def test_a_value_with_odd_headers_hides_no_other(bus: NatsBus, nats_server: NatsServer, lines: bytes) -> None:
    seen: set[str] = set()
    await bus.watch("B", lambda entry, key: seen.add(key))
    await bus.put("B", "k.1", b"")
    await tell(nats_server, lines)
    await bus.put("B", "k.2", b"")
    await until(lambda: {"k.1", "k.2"} <= seen)
    api = JetStreamApi(bus._store, 5.0)
    for reader in (StreamReader(api, is_direct=True), StreamReader(api, is_direct=False)):
        found = [message.subject for message in await reader.newest("KV_B", "$KV.B.>")]
        assert (found[0], found[-1]) == ("$KV.B.k.1", "$KV.B.k.2")
        assert await reader.holds("KV_B", 2)
    later: set[str] = set()
    watch = await bus.watch("B", lambda entry, key: later.add(key))
    assert {"k.1", "k.2"} <= later
    await watch.close()


async def test_a_subject_that_would_cost_the_connection_is_not_sent(bus: NatsBus) -> None:
    """Ack subjects come from others, too. The broker hangs up on lines beyond 4 KiB."""
    reconnects: list[None] = []
    bus.on_reconnect(lambda: reconnects.append(None))
    for length in (4_090, 5_000, 1_000_000):
        ack_subject = f"$JS.ACK.{'a' * length}.c.1.1.1.1.0"
        with pytest.raises(BusRefused) as caught:
            await bus.acknowledge(ack_subject)
        assert len(str(caught.value)) < 1000
        bus.in_progress(ack_subject)
        bus.give_back(ack_subject)
        with pytest.raises(ValueError, match="subject"):
            await bus.enqueue("requests." + "é" * (length // 2), b"", message_id="1")
    long = "x." + "é" * (MAX_SUBJECT_BYTES // 2 - 1)
    got: list[Message] = []
    await bus.subscribe(long, got.append)
    bus.publish(long, b"")
    await until(lambda: got)
    assert await bus.enqueue(SUBJECT, b"", message_id="1")
    assert not reconnects
