"""Settings that every service has, or several."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from headrace_shared.settings import Secret


class CommonSettings(Struct, frozen=True, kw_only=True):
    """What every service has."""

    nats_url: str = "nats://127.0.0.1:4222"
    """Address of the broker; several, separated by commas, for a cluster."""
    nats_replicas: Annotated[int, Meta(ge=1, le=5)] = 1
    """Copies of each stream in a cluster of brokers: 3 survive the loss of one broker. The same for all services."""
    nats_user: str = ""
    """User name at the broker."""
    nats_password: Secret = ""
    """Password at the broker."""
    broker_credentials: str = ""
    """File with this service's key at the broker, as `headrace init` makes it."""
    broker_ca: str = ""
    """File with the authority that has signed the broker's certificate; with it, everything is encrypted."""
    service_id: Annotated[str, Meta(pattern="^[A-Za-z0-9_-]{0,64}$")] = ""
    """Name of this process, different for each start; empty: chosen at random."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe level that is logged."""
    log_format: Literal["auto", "console", "json"] = "auto"
    """auto: console on a terminal, else json."""
    health_host: str = "127.0.0.1"
    """Address of the health endpoint (/live, /health, /metrics)."""
    health_port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """Port of the health endpoint; 0: a free one."""
    drain_timeout_s: Annotated[float, Meta(ge=0, le=3600)] = 20.0
    """Longest time to finish what is running after SIGTERM."""


class QueueSettings(CommonSettings, frozen=True, kw_only=True):
    """Of services that make the queue. One definition, since the last one to start decides."""

    queue_max_messages: Annotated[int, Meta(ge=1)] = 100_000
    """Most requests in the queue; the next one is refused."""
    queue_max_bytes: Annotated[int, Meta(ge=1 << 20)] = 1 << 30
    """Most bytes in the queue."""
