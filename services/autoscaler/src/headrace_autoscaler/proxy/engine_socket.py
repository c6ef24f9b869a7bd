"""Calls of the Docker Engine at its socket: one connection each, bounded in time and size."""

import asyncio
from typing import Any, NamedTuple

import h11
import msgspec

MAX_REPLY_BYTES = 4 * 1024 * 1024
CONNECT_TIMEOUT_S = 3.0
_READ_BYTES = 64 * 1024
_PASSED_ON = (b"api-version", b"ostype", b"docker-experimental", b"builder-version", b"swarm")
"""Of the headers: what clients look at."""


class EngineUnavailable(Exception):
    """There is no engine at the socket, or it does not answer in time or talks nonsense."""


class EngineReply(NamedTuple):
    status: int
    body: bytes
    content_type: str
    headers: tuple[tuple[str, str], ...]


class EngineSocket:
    def __init__(self, path: str) -> None:
        self._path = path

    async def call(self, method: str, target: str, body: Any = None, timeout_s: float = 30.0) -> EngineReply:
        """`body` becomes JSON. Raises EngineUnavailable."""
        data = b"" if body is None else msgspec.json.encode(body)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                reader, writer = await asyncio.open_unix_connection(self._path)
        except (OSError, TimeoutError) as error:
            reason = "connecting takes too long" if isinstance(error, TimeoutError) else str(error.strerror or error)
            raise EngineUnavailable(f"no Docker engine at {self._path}: {reason}") from error
        try:
            async with asyncio.timeout(timeout_s):
                return await _exchange(reader, writer, method, target, data)
        except TimeoutError as error:
            raise EngineUnavailable(f"the engine has not answered {method} for {timeout_s:.0f} s") from error
        except (OSError, h11.RemoteProtocolError) as error:
            raise EngineUnavailable(f"the engine broke off: {error}") from error
        finally:
            writer.close()


async def _exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, method: str, target: str, body: bytes
) -> EngineReply:
    connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=_READ_BYTES)
    headers = [("Host", "docker"), ("Connection", "close"), ("Content-Length", str(len(body)))]
    if body:
        headers.append(("Content-Type", "application/json"))
    out = connection.send(h11.Request(method=method, target=target, headers=headers)) or b""
    if body:
        out += connection.send(h11.Data(data=body)) or b""
    writer.write(out + (connection.send(h11.EndOfMessage()) or b""))
    await writer.drain()
    head: h11.Response | None = None
    received = bytearray()
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(await reader.read(_READ_BYTES))
        elif isinstance(event, h11.Response):
            head = event
        elif isinstance(event, h11.Data):
            received += event.data
            if len(received) > MAX_REPLY_BYTES:
                raise EngineUnavailable(f"the engine's answer exceeds {MAX_REPLY_BYTES} bytes")
        elif isinstance(event, h11.EndOfMessage) and head is not None:
            found = dict(head.headers)
            return EngineReply(
                head.status_code,
                bytes(received),
                found.get(b"content-type", b"text/plain").decode("latin-1"),
                tuple((name.decode(), found[name].decode("latin-1")) for name in _PASSED_ON if name in found),
            )
        elif isinstance(event, h11.InformationalResponse):
            continue
        else:
            raise EngineUnavailable("the engine broke off")
