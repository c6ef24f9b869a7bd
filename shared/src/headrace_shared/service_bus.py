"""A service's connection to the broker, from its settings."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

from headrace_shared.broker_permissions import Role
from headrace_shared.common_settings import CommonSettings
from headrace_shared.errors import ConfigError
from headrace_shared.nats_bus import NatsBus
from headrace_shared.service import Service
from headrace_shared.tasks import done_before
from headrace_shared.telemetry import Instrument

CONNECTED = Instrument("gauge", "headrace_broker_connected", "1 while the broker answers.")
DISCONNECTED = Instrument(
    "gauge", "headrace_broker_disconnected_seconds", "Since when the broker has not answered; 0 while it does."
)
RECONNECTS = Instrument("counter", "headrace_broker_reconnects_total", "Times that the broker was back.")


@asynccontextmanager
async def service_bus(service: Service, settings: CommonSettings) -> AsyncIterator[NatsBus]:
    """Connects, and disconnects at the end of the block. The service fails when the connection closes for good, and
    ends if it is to end before there is one. Raises BusUnavailable, ConfigError."""
    connecting = asyncio.create_task(_connect(service, settings), name="connect")
    if not await done_before(service.draining, connecting):
        service.stop()
        await asyncio.Event().wait()  # for the cancellation
    bus = connecting.result()
    service.metrics.gauge(CONNECTED).set_function(lambda: float(bus.is_connected))
    service.metrics.gauge(DISCONNECTED).set_function(lambda: bus.disconnected_for_s)
    bus.on_reconnect(service.metrics.counter(RECONNECTS).inc)
    try:
        yield bus
    finally:
        await bus.close()


async def _connect(service: Service, settings: CommonSettings) -> NatsBus:
    urls = [url.strip() for url in settings.nats_url.split(",")]
    if not all(map(_is_address, urls)):
        # It may hold a password.
        raise ConfigError("nats_url", "must be addresses like nats://127.0.0.1:4222, with commas between them")
    return await NatsBus.connect(
        urls,
        name=service.id,
        on_closed=lambda: service.fail("the broker's connection is closed for good"),
        user=settings.nats_user or None,
        password=settings.nats_password or None,
        role=Role(service.name),
        credentials=settings.broker_credentials,
        authority=settings.broker_ca,
        num_replicas=settings.nats_replicas,
    )


def _is_address(url: str) -> bool:
    """Else nats-py would find nobody there, again and again."""
    try:
        parts = urlsplit(url if "://" in url else f"nats://{url}")
        return bool(parts.hostname) and " " not in url and parts.port != 0
    except ValueError:
        return False
