"""A TCP proxy that misbehaves on demand, for tests and benchmarks: latency, a cut, a silent stall, other bytes.

It forwards bytes in order; `delay_s` holds each chunk for that long in each direction without limiting the bandwidth.
"""

import asyncio
import contextlib
from collections.abc import Callable

_CHUNK_BYTES = 64 * 1024
_MAX_CHUNKS_IN_FLIGHT = 4096


class ChaosProxy:
    """Listens on a free loopback port (`port`) and forwards to `target_port` on loopback."""

    def __init__(self, target_port: int, *, delay_s: float = 0.0) -> None:
        self.delay_s = delay_s
        self.damage: Callable[[bytes], bytes] = lambda chunk: chunk
        """Of what comes from the target."""
        self.port = 0
        self._target_port = target_port
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()

    async def __aenter__(self) -> "ChaosProxy":
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        await self.cut()

    async def cut(self) -> None:
        """Breaks every connection; new ones are accepted."""
        tasks = list(self._connections)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def stall(self) -> None:
        """Swallows nothing, forwards nothing: the peer looks alive but silent, as behind a dead link."""
        self._flowing.clear()

    def flow(self) -> None:
        self._flowing.set()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._connect(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._forward(reader, up_writer))
                    group.create_task(self._forward(up_reader, writer, lambda chunk: self.damage(chunk)))
            finally:
                up_writer.close()
        except* (ConnectionError, OSError, asyncio.IncompleteReadError):
            pass  # either side may break at any time; the other one is closed below
        finally:
            writer.close()

    async def _forward(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        damage: Callable[[bytes], bytes] = lambda chunk: chunk,
    ) -> None:
        clock: Callable[[], float] = asyncio.get_running_loop().time
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_MAX_CHUNKS_IN_FLIGHT)

        async def send() -> None:
            while True:
                due, chunk = await queue.get()
                await asyncio.sleep(max(0.0, due - clock()))
                await self._flowing.wait()
                if not chunk:
                    break
                writer.write(chunk)
                await writer.drain()
            with contextlib.suppress(OSError):
                writer.write_eof()

        async with asyncio.TaskGroup() as group:
            group.create_task(send())
            while chunk := await reader.read(_CHUNK_BYTES):
                await queue.put((clock() + self.delay_s, damage(chunk)))
            await queue.put((clock() + self.delay_s, b""))
