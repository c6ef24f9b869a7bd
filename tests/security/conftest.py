"""A broker with the services' users, and buses with their rights."""

from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Protocol

import pytest

from headrace_shared.broker import NatsServer
from headrace_shared.broker_credentials import key_path
from headrace_shared.broker_permissions import Role
from headrace_shared.nats_bus import NatsBus
from headrace_shared.provisioning import provision
from headrace_shared.subjects import FLIGHT, requests_stream
from tests.security.raw_client import guarded_server


class As(Protocol):
    def __call__(self, role: Role, request_timeout_s: float = 1.0) -> Awaitable[NatsBus]: ...


PATIENT_S = 30.0
"""For who must get an answer while others flood the broker."""


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[NatsServer]:
    server = guarded_server(tmp_path)
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def bus_of(guarded: NatsServer, tmp_path: Path) -> AsyncIterator[As]:
    """All streams and buckets are there."""
    buses: list[NatsBus] = []

    async def connect(role: Role, request_timeout_s: float = 1.0) -> NatsBus:
        bus = await NatsBus.connect(
            guarded.url,
            name=f"{role}-{len(buses)}",
            on_closed=lambda: None,
            role=role,
            credentials=str(key_path(tmp_path / "keys", role)),
            request_timeout_s=request_timeout_s,
        )
        buses.append(bus)
        return bus

    scheduler = await connect(Role.SCHEDULER)
    await provision(scheduler, requests_stream(1000, 64 << 20))
    await scheduler.ensure_stream(FLIGHT)
    yield connect
    for bus in buses:
        await bus.close()
