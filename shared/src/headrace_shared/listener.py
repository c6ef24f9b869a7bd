"""A TCP server that owns its connections: each is a task, their number is bounded, and closing ends them all."""

import asyncio
from collections.abc import Awaitable, Callable

from headrace_shared.tasks import end

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Listener:
    def __init__(self, serve: Serve, *, max_connections: int, read_limit: int, cuts_oldest: bool) -> None:
        """`serve` closes its writer. `cuts_oldest`: when there are too many, instead of refusing the new one."""
        self._serve = serve
        self._max_connections = max_connections
        self._read_limit = read_limit
        self._cuts_oldest = cuts_oldest
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.Task[None], None] = {}
        """Oldest first."""

    async def start(self, host: str, port: int) -> int:
        """Listens; returns the port (useful for port 0). Raises OSError if it is taken."""
        self._server = await asyncio.start_server(self._accept, host, port, limit=self._read_limit)
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    async def close(self) -> None:
        """Stops listening, and cuts whoever is connected."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in list(self._connections):
            await end(task)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= self._max_connections:
            oldest = next((task for task in self._connections if not task.cancelling()), None)
            if oldest is None or not self._cuts_oldest:
                writer.close()
                return
            oldest.cancel()
        task = asyncio.create_task(self._attend(reader, writer), name="connection")
        self._connections[task] = None
        task.add_done_callback(lambda done: self._connections.pop(done, None))

    async def _attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._serve(reader, writer)
        finally:
            writer.close()
