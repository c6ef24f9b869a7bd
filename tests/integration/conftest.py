"""Fixtures of the tests that run schedulers and workers as processes."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headrace_shared.broker import NatsServer
from tests.integration.deployment import Client, Deployment


@pytest.fixture
async def deployment(nats_server: NatsServer, tmp_path: Path) -> AsyncIterator[Deployment]:
    deployment = Deployment(nats_server, tmp_path)
    yield deployment
    await deployment.close()


@pytest.fixture
async def client(nats_server: NatsServer) -> AsyncIterator[Client]:
    async with Client.connect(nats_server.url) as client:
        yield client
