"""What we ask of nats-py beyond its public interface: a new version that breaks this breaks here."""

import asyncio
from collections.abc import AsyncIterator

import nats.errors
import pytest

from headrace_shared.broker import NatsServer
from headrace_shared.nats_client import DirectClient, Incoming, _Reader
from tests.patience import PATIENCE_S
from tests.shared.bus_helpers import pause, until

pytestmark = pytest.mark.nats


@pytest.fixture
async def client(nats_server: NatsServer) -> AsyncIterator[DirectClient]:
    client = DirectClient()
    await client.connect(nats_server.url, allow_reconnect=False, pending_size=0)
    yield client
    nats_server.resume()
    await client.close()


async def _settle(client: DirectClient) -> None:
    """All that was sent has come back."""
    await asyncio.sleep(0)
    await client.flush()


async def test_messages_arrive_as_they_were_sent_and_in_order(client: DirectClient) -> None:
    got: list[Incoming] = []
    client.listen("a.*", got.append)
    client.send("a.b", b"", None, "")
    client.send("a.c", b"\r\nMSG a.b 1 0\r\n", {"One": "1", "Two": "zwei: \u00fc"}, "back")
    client.send("a.b", b"x" * 100_000, None, "")
    await until(lambda: len(got) == 3)
    assert got == [
        ("a.b", "", b"", {}),
        ("a.c", "back", b"\r\nMSG a.b 1 0\r\n", {"One": "1", "Two": "zwei: \u00fc"}),
        ("a.b", "", b"x" * 100_000, {}),
    ]


async def test_a_message_is_handled_where_it_is_read(client: DirectClient) -> None:
    """No task for it, for its subscription, or for what is sent."""
    before = len(asyncio.all_tasks())
    tasks: list[asyncio.Task[None] | None] = []
    for number in range(10):
        client.listen(f"s.{number}", lambda _: tasks.append(asyncio.current_task()))
    for number in range(10):
        client.send(f"s.{number}", b"", None, "")
    await until(lambda: tasks)
    await _settle(client)
    assert tasks == [None] * 10 and len(asyncio.all_tasks()) == before


async def test_what_nats_py_sends_itself_keeps_its_place(client: DirectClient) -> None:
    got: list[bytes] = []
    client.listen("x", lambda message: got.append(message.data))
    client.send("x", b"1", None, "")
    await client.publish("x", b"2")
    client.send("x", b"3", None, "")
    await _settle(client)
    assert got == [b"1", b"2", b"3"]
    await client._process_ping()  # the broker asks whether we live; it would hang up on a wrong answer
    client.send("x", b"4", None, "")
    await _settle(client)
    assert got[3:] == [b"4"]


class Stream:
    """Of nats-py."""

    def __init__(self) -> None:
        self.data = b""

    def data_received(self, data: bytes) -> None:
        self.data += data


def _with_headers(address: bytes, headers: bytes, data: bytes) -> bytes:
    return b"HMSG %b %d %d\r\n%b%b\r\n" % (address, len(headers), len(headers) + len(data), headers, data)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 20, 1000])
def test_messages_are_found_however_they_are_cut(size: int) -> None:
    stream, got = Stream(), list[Incoming]()
    reader = _Reader(stream, {1: got.append, 12: got.append}, pytest.fail)
    wire = (
        b"PING\r\nMSG a 1 5\r\nP\r\nNG\r\nINFO {}\r\nMSG b.c 12 back 0\r\n\r\nMSG gone 3 1\r\nx\r\n"
        + _with_headers(b"d 1", b"NATS/1.0\r\nKey: a:b\r\nNo\r\n\r\n", b"{}")
        + _with_headers(b"e 12 back", b"NATS/1.0 404 No Messages\r\nNats-Last: 3\r\n\r\n", b"")
        + b"+OK\r\n"
        + _with_headers(b"f 1", b"NATS/1.0 503\r\n\r\n", b"")
        + b"-ERR 'x'\r\n"
    )
    for start in range(0, len(wire), size):
        reader.data_received(wire[start : start + size])
    assert got == [
        ("a", "", b"P\r\nNG", {}),
        ("b.c", "back", b"", {}),
        ("d", "", b"{}", {"Key": "a:b"}),
        ("e", "back", b"", {"Status": "404", "Description": "No Messages", "Nats-Last": "3"}),
        ("f", "", b"", {"Status": "503", "Description": ""}),
    ]
    assert stream.data == b"PING\r\nINFO {}\r\n+OK\r\n-ERR 'x'\r\n"


@pytest.mark.parametrize("odd", [b"\xff", b"a\x0bb", b"a\x0cb", b"\xc2\xa0", b"\x00"])
def test_a_subject_may_hold_any_bytes(odd: bytes) -> None:
    """The broker lets them pass, and an error here would cost the connection."""
    got: list[Incoming] = []
    reader = _Reader(Stream(), {1: got.append}, pytest.fail)
    reader.data_received(b"MSG a.%b 1 1\r\nx\r\nMSG a 1 back.%b 1\r\ny\r\nMSG b 1 0\r\n\r\n" % (odd, odd))
    text = odd.decode(errors="replace")
    assert got == [(f"a.{text}", "", b"x", {}), ("a", f"back.{text}", b"y", {}), ("b", "", b"", {})]


@pytest.mark.parametrize(
    "headers",
    [
        b"NATS/1.0\r\nStatus: 404\r\n\r\n",
        b"NATS/1.0 404 No Messages\r\nNats-Sequence: 3\r\n\r\n",
        b"NATS/1.0\nStatus: 503\r\n\r\n",
        b"\xff\x00 404\r\n\r\n",
        b"NATS/1.0 4\r\n\r\n",
        b"\r\n",
        b"",
    ],
)
def test_only_the_server_itself_tells_a_status(headers: bytes) -> None:
    """What was stored with one would end the reading of a stream."""
    got: list[Incoming] = []
    _Reader(Stream(), {1: got.append}, pytest.fail).data_received(_with_headers(b"a 1", headers, b"x"))
    assert [(message.status, message.data) for message in got] == [("", b"x")]


@pytest.mark.parametrize("line", [b"MSG a 1 98765432", b"HMSG a 1 12 98765432", b"MSG a 5"])
def test_a_size_that_no_message_has_is_not_waited_for(line: bytes) -> None:
    got: list[Incoming] = []
    aborted: list[bool] = []
    reader = _Reader(Stream(), {1: got.append}, lambda: aborted.append(True))
    reader.data_received(line + b"\r\nx")
    assert aborted == [True] and not got


async def test_nothing_comes_to_who_has_left(client: DirectClient) -> None:
    got: list[bytes] = []

    def once(message: Incoming) -> None:
        got.append(message.data)
        client.forget(subscription)

    subscription = client.listen("x", once)
    client.send("x", b"1", None, "")
    client.send("x", b"2", None, "")
    await _settle(client)
    client.forget(subscription)
    client.send("x", b"3", None, "")
    await _settle(client)
    assert got == [b"1"]


async def test_a_status_of_the_server_is_told(client: DirectClient) -> None:
    got: list[Incoming] = []
    client.listen("back", got.append)
    client.send("nobody.listens", b"", None, "back")
    await until(lambda: got)
    assert got[0].status == "503"


async def test_what_the_socket_does_not_take_is_known(client: DirectClient, nats_server: NatsServer) -> None:
    assert client.unsent_bytes == 0
    await pause(nats_server)
    for _ in range(200):
        client.send("x", b"y" * 100_000, None, "")
    assert client.unsent_bytes > 1_000_000
    nats_server.resume()
    await until(lambda: client.unsent_bytes == 0)


async def test_what_one_turn_sends_is_written_together(client: DirectClient, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[bytes] = []
    monkeypatch.setattr(client._transport, "write", written.append)
    client.send("x", b"1", None, "")
    client.send("x", b"2", None, "y")
    assert not written and client.unsent_bytes
    await asyncio.sleep(0)
    assert written == [b"PUB x  1\r\n1\r\nPUB x y 1\r\n2\r\n"] and not client.unsent_bytes
    client.send("x", b"3", None, "")
    await asyncio.sleep(0)
    client.send("x", bytes(70_000), None, "")
    assert len(written) == 3, "much is not gathered"
    await asyncio.sleep(0)
    assert len(written) == 3


async def test_what_cannot_be_sent_is_refused(client: DirectClient) -> None:
    with pytest.raises(nats.errors.MaxPayloadError):
        client.send("x", b"y" * (client.max_payload + 1), None, "")
    await client.close()
    assert client.unsent_bytes == 0
    with pytest.raises(nats.errors.ConnectionClosedError):
        client.send("x", b"", None, "")
    with pytest.raises(nats.errors.ConnectionClosedError):
        client.listen("x", lambda _: None)
    client.forget(1)


async def test_nothing_is_sent_on_a_socket_that_is_closed_before_nats_py_knows_it(client: DirectClient) -> None:
    client.send("x", b"", None, "")
    assert client._socket is not None
    client._socket.abort()
    assert client.is_connected
    with pytest.raises(nats.errors.ConnectionClosedError):
        client.send("x", bytes(100_000), None, "")
    with pytest.raises(nats.errors.ConnectionClosedError):
        client.listen("x", lambda _: None)
    await asyncio.sleep(0)  # what had been gathered is not written


async def test_the_end_is_told_after_a_ping_of_nats_py_too(nats_server: NatsServer) -> None:
    """It sends one each hour, and counted it as unsent: at the end it waited for a socket that was broken."""
    ended = asyncio.Event()

    async def on_closed() -> None:
        ended.set()

    client = DirectClient()
    await client.connect(nats_server.url, allow_reconnect=False, pending_size=0, closed_cb=on_closed)
    await client._send_ping()
    await until(lambda: client._pongs_received)
    assert client._socket is not None
    client._socket.abort()
    await asyncio.wait_for(ended.wait(), PATIENCE_S)
