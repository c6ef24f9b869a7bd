"""Settings of the proxy in front of the Docker engine."""

from typing import Annotated

from msgspec import Meta

from headrace_shared.common_settings import CommonSettings


class ProxySettings(CommonSettings, frozen=True, kw_only=True):
    """Those of every service come first; the broker's are of no concern here."""

    project: Annotated[str, Meta(pattern="^[a-z0-9][a-z0-9_-]{0,62}$")] = "headrace"
    """Compose project (or Swarm stack) whose workers may be cloned, started and stopped."""
    docker_socket: str = "/var/run/docker.sock"
    """The engine's socket."""
    proxy_host: str = "127.0.0.1"
    """Address to listen on."""
    proxy_port: Annotated[int, Meta(ge=0, le=65535)] = 2375
    """Port to listen on; 0: a free one."""
    max_containers: Annotated[int, Meta(ge=1, le=200)] = 64
    """Most containers (or replicas of a Swarm service) that may be there at a time."""
    swarm: bool = False
    """Whether the stack's worker service may be scaled."""
