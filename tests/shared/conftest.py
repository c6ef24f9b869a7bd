"""Buses for the tests of this package."""

import asyncio
import io
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import structlog
import uvloop

from headrace_shared.broker import NatsServer
from headrace_shared.memory_bus import MemoryBroker, MemoryBus
from headrace_shared.nats_bus import NatsBus
from headrace_shared.subjects import requests_stream
from tests.shared.bus_helpers import BUCKET, CONSUMER, Connect, Pair


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """As in the services. Most other tests connect to the broker with asyncio's own."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(params=["memory", pytest.param("nats", marks=pytest.mark.nats)])
async def pair(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Pair]:
    """For the contract: the real broker, and its in-process twin."""
    if request.param == "memory":
        broker = MemoryBroker()
        yield Pair(MemoryBus(broker), MemoryBus(broker))
        return
    server = NatsServer(tmp_path, sync_interval="100ms")
    await server.start()
    closed: list[None] = []
    a, b = [await NatsBus.connect(server.url, name=n, on_closed=lambda: closed.append(None)) for n in "ab"]
    yield Pair(a, b)
    await a.close()
    await b.close()
    await server.stop()
    assert not closed


@pytest.fixture
async def connect(nats_server: NatsServer) -> AsyncIterator[Connect]:
    buses: list[NatsBus] = []
    closed: list[None] = []

    async def connect_one() -> NatsBus:
        bus = await NatsBus.connect(nats_server.url, name="test", on_closed=lambda: closed.append(None))
        buses.append(bus)
        return bus

    yield connect_one
    nats_server.resume()
    for bus in buses:
        await bus.close()
    assert not closed, "no outage closes a bus for good"


@pytest.fixture
async def bus(connect: Connect) -> NatsBus:
    """With a work queue and a bucket."""
    bus = await connect()
    await bus.ensure_stream(requests_stream(10_000, 100 * 1024 * 1024))
    await bus.ensure_consumer(CONSUMER)
    await bus.ensure_bucket(BUCKET)
    return bus


@pytest.fixture
def logs() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level, raises = root.handlers[:], root.level, logging.raiseExceptions
    stream = io.StringIO()
    yield stream
    logging.raiseExceptions = raises
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()
