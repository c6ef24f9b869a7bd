"""Closing, cancelled or in the middle of a reconnect: nothing stays, and nobody waits for what will not come."""

import asyncio

import pytest

from headrace_shared.broker import NatsServer
from headrace_shared.errors import BusUnavailable
from headrace_shared.nats_bus import NatsBus
from headrace_shared.nats_connection import NatsConnection
from tests.patience import PATIENCE_S
from tests.shared.bus_helpers import CONSUMER, Connect, until

pytestmark = pytest.mark.nats


async def _steps(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_close_that_was_cancelled_can_be_repeated(bus: NatsBus, nats_server: NatsServer) -> None:
    before = asyncio.all_tasks()
    for num_steps in range(40):
        visitor = await NatsBus.connect(nats_server.url, name="visitor", on_closed=lambda: None)
        await visitor.watch("B", lambda entry, key: None)
        closing = asyncio.create_task(visitor.close())
        await _steps(num_steps)
        closing.cancel()
        await asyncio.wait([closing])
        await visitor.close()
        await until(lambda: asyncio.all_tasks() <= before)
        assert not visitor.is_connected


async def test_a_bus_that_is_closed_while_it_reconnects_keeps_nobody_waiting(
    bus: NatsBus, nats_server: NatsServer
) -> None:
    before = asyncio.all_tasks()
    for num_steps in range(40):
        visitor = await NatsBus.connect(nats_server.url, name="visitor", on_closed=lambda: None)
        pull = asyncio.create_task(visitor.pull(CONSUMER, PATIENCE_S))
        await until(lambda: visitor._store._replies and visitor._streams._idle_slots)  # noqa: B023 - waited for
        for connection in (visitor._core, visitor._store):
            assert connection._link._client is not None
            connection._link._client.abort()
        await _steps(num_steps)
        await visitor.close()
        with pytest.raises(BusUnavailable):
            await asyncio.wait_for(pull, PATIENCE_S / 4)
        await until(lambda: asyncio.all_tasks() <= before)


async def test_a_client_is_gone_even_if_its_end_is_cancelled(
    bus: NatsBus, monkeypatch: pytest.MonkeyPatch, connect: Connect
) -> None:
    """Its socket and tasks would stay, and the broker would send what nobody reads."""
    link = bus._store._link
    client = link._client
    assert client is not None
    reached = asyncio.Event()

    async def stop_in_the_middle(_: NatsConnection) -> None:
        reached.set()
        await asyncio.sleep(PATIENCE_S)

    monkeypatch.setattr(NatsConnection, "link_down", stop_in_the_middle)
    dropping = asyncio.create_task(link._drop_client())
    await reached.wait()
    monkeypatch.undo()
    dropping.cancel()
    await asyncio.wait([dropping])
    await until(lambda: client.is_closed and not link._leftovers)


async def test_a_watch_that_is_still_reading_ends_with_its_bus(connect: Connect) -> None:
    bus = await connect()
    opening = asyncio.create_task(bus.watch("NONE", lambda entry, key: None))
    await until(lambda: bus._watches)
    await _steps(3)
    await bus.close()
    with pytest.raises(BusUnavailable, match="closed"):
        await asyncio.wait_for(opening, PATIENCE_S)
