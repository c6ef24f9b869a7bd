"""A service's connection to the broker, from its settings."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from headrace_shared.nats_bus import NatsBus
from headrace_shared.service import Service
from headrace_shared.settings import CommonSettings


@asynccontextmanager
async def service_bus(service: Service, settings: CommonSettings) -> AsyncIterator[NatsBus]:
    """Connects, and disconnects at the end of the block. The service fails when the connection closes for good. Raises
    BusUnavailable."""
    bus = await NatsBus.connect(
        [url.strip() for url in settings.nats_url.split(",")],
        name=service.id,
        on_closed=lambda: service.fail("the broker's connection is closed for good"),
        user=settings.nats_user or None,
        password=settings.nats_password or None,
        num_replicas=settings.nats_replicas,
    )
    try:
        yield bus
    finally:
        await bus.close()
