"""Three nats-servers that make one cluster on this host."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import nats

from headrace_shared.broker import ClusterMember, NatsServer

NUM_SERVERS = 3


class NatsCluster:
    def __init__(self, servers: list[NatsServer]) -> None:
        self.servers = servers

    @property
    def url(self) -> str:
        return ",".join(server.url for server in self.servers)

    async def leader(self, stream: str) -> NatsServer:
        """The member that leads a stream now."""
        name = (await self.stream_info(stream))["cluster"]["leader"]
        return self.servers[int(name.removeprefix("n"))]

    async def stream_info(self, stream: str) -> dict[str, Any]:
        connection = await nats.connect(self.url.split(","), connect_timeout=2, max_reconnect_attempts=2)
        try:
            info: dict[str, Any] = await connection.jetstream()._api_request(f"$JS.API.STREAM.INFO.{stream}", timeout=5)
            return info
        finally:
            await connection.close()


@asynccontextmanager
async def nats_cluster(folder: Path) -> AsyncIterator[NatsCluster]:
    ports = _free_ports(NUM_SERVERS)
    servers = [
        NatsServer(folder / f"n{number}", sync_interval="100ms", cluster=ClusterMember(f"n{number}", port, ports))
        for number, port in enumerate(ports)
    ]
    try:
        await asyncio.gather(*(server.start() for server in servers))
        yield NatsCluster(servers)
    finally:
        await asyncio.gather(*(server.stop() for server in servers))


def _free_ports(count: int) -> tuple[int, ...]:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return tuple(probe.getsockname()[1] for probe in probes)
