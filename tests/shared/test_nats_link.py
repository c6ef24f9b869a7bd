"""Which broker of a cluster is tried next, and what is no broker."""

import asyncio
from itertools import pairwise
from typing import Any

import pytest

from headrace_shared.broker_identity import BrokerIdentity
from headrace_shared.errors import BusUnavailable
from headrace_shared.nats_link import LinkOptions, NatsLink
from tests.shared.bus_helpers import until

NOBODY_IN_PARTICULAR = BrokerIdentity(None, "", "", "", "")


class Nobody:
    async def link_up(self) -> None:
        return

    async def link_down(self) -> None:
        return

    def link_restored(self) -> None:
        return

    def link_closed(self) -> None:
        return


@pytest.mark.parametrize("num_servers", [1, 2, 3])
async def test_a_broker_that_does_not_answer_is_not_tried_twice_in_a_row(
    monkeypatch: pytest.MonkeyPatch, num_servers: int
) -> None:
    """As long as there are others."""
    tried: list[str] = []

    async def refuse(_: NatsLink, client: Any, server: str) -> None:
        tried.append(server)
        raise OSError("nobody is there")

    monkeypatch.setattr(NatsLink, "_attempt", refuse)
    monkeypatch.setattr("headrace_shared.nats_link.MIN_RETRY_S", 0.001)
    monkeypatch.setattr("headrace_shared.nats_link.MAX_RETRY_S", 0.001)
    servers = tuple(f"nats://broker-{number}:4222" for number in range(num_servers))
    link = NatsLink(LinkOptions(servers, "test", NOBODY_IN_PARTICULAR, 2.0), Nobody())
    with pytest.raises(BusUnavailable):
        await link.open(0.2)
    await link.close()
    assert set(tried) == set(servers) and len(tried) > 3
    if num_servers > 1:
        assert all(before != after for before, after in pairwise(tried))


@pytest.mark.parametrize(
    "greeting",
    [
        b"",
        b"INFO",
        b"INFO ",
        b"INFO {}\r\n",
        b"INFO []\r\n",
        b"INFO {}\r\n-ERR",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"x" * 100_000,
    ],
)
async def test_a_greeting_that_is_cut_or_of_something_else_is_no_reason_to_give_up(greeting: bytes) -> None:
    """A broker that dies while it greets, or whose proxy answers for it, comes back."""
    num_greeted = 0

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_greeted
        num_greeted += 1
        writer.write(greeting)
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    url = f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    link = NatsLink(LinkOptions((url,), "test", NOBODY_IN_PARTICULAR, 2.0), Nobody())
    with pytest.raises(BusUnavailable, match="no broker at"):
        await link.open(0.2)
    await link.close()
    server.close()
    assert num_greeted > 1


async def test_a_broker_that_hangs_up_at_once_is_not_called_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when what awaits us there is what it hangs up on: two processors were busy with connecting."""
    num_attempts = 0

    async def attempt(link: NatsLink, client: Any, server: str) -> None:
        nonlocal num_attempts
        num_attempts += 1
        if num_attempts > 1:
            link._lost.set()

    monkeypatch.setattr(NatsLink, "_attempt", attempt)
    link = NatsLink(LinkOptions(("nats://broker:4222",), "test", NOBODY_IN_PARTICULAR, 2.0), Nobody())
    await link.open(1.0)
    link._lost.set()
    await until(lambda: num_attempts > 2)
    await asyncio.sleep(0.5)
    await link.close()
    assert num_attempts < 20


async def test_an_address_that_means_nothing_is_told() -> None:
    """And not that there is no server, which is nats-py's word for anything."""
    server = "nats://nobody.invalid:4222"
    link = NatsLink(LinkOptions((server,), "test", NOBODY_IN_PARTICULAR, 2.0), Nobody())
    with pytest.raises(BusUnavailable, match=rf"(?i)no broker at {server}: .*\bname\b"):
        await link.open(0.0)
    await link.close()
