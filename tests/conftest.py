"""A fresh nats-server for each test that asks for one."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headrace_shared.broker import NatsServer


@pytest.fixture
async def nats_server(tmp_path: Path) -> AsyncIterator[NatsServer]:
    server = NatsServer(tmp_path / "nats", sync_interval="100ms")
    await server.start()
    yield server
    await server.stop()
