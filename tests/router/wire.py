"""HTTP replies as they come over the socket, and what each stands for."""

import asyncio
import json
import socket
from collections.abc import Mapping
from typing import Any, NamedTuple

from tests.router.raw_http import raw_connection


class Reply(NamedTuple):
    status: int
    headers: dict[str, str]
    """Names in lower case. Raises AssertionError where one comes twice."""
    body: bytes
    pieces: list[bytes]
    """Of a chunked body: its chunks, without the last, empty one."""

    @property
    def events(self) -> list[bytes]:
        """The stream's blocks, each without the empty line behind it."""
        assert self.body.endswith(b"\n\n")
        return self.body.split(b"\n\n")[:-1]

    @property
    def data(self) -> list[dict[str, Any]]:
        """JSON of all events but [DONE]. Comments are left out."""
        found = [event.removeprefix(b"data: ") for event in self.events if event and not event.startswith(b":")]
        return [json.loads(event) for event in found if event != b"[DONE]"]

    @property
    def error(self) -> dict[str, Any]:
        told: dict[str, Any] = json.loads(self.body)["error"]
        return told


def request_bytes(
    path: str, body: Any = None, method: str | None = None, headers: Mapping[str, str] | None = None
) -> bytes:
    """`body`: bytes, or what becomes JSON. None: no body."""
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    head = f"{method or ('GET' if body is None else 'POST')} {path} HTTP/1.1\r\nHost: x\r\n"
    given = {"Content-Length": str(len(data))} if data else {}
    given |= headers or {}
    return (head + "".join(f"{name}: {value}\r\n" for name, value in given.items()) + "\r\n").encode() + data


async def send(port: int, *requests: bytes) -> list[Reply]:
    """One after the other, on one connection that stays open."""

    def exchange() -> list[Reply]:
        with raw_connection(port) as connection:
            replies = []
            for request in requests:
                connection.sendall(request)
                replies.append(_read(connection, has_body=not request.startswith(b"HEAD ")))
            return replies

    return await asyncio.to_thread(exchange)


def _read(connection: socket.socket, *, has_body: bool) -> Reply:
    with connection.makefile("rb") as stream:  # nothing of a next reply has been asked for
        status = int(stream.readline().split(b" ")[1])
        headers: dict[str, str] = {}
        while line := stream.readline().rstrip(b"\r\n"):
            name, _, value = line.decode().partition(":")
            assert name.lower() not in headers, name
            headers[name.lower()] = value.strip()
        if headers.get("transfer-encoding") == "chunked" and has_body:
            pieces = []
            while size := int(stream.readline(), 16):
                pieces.append(stream.read(size))
                assert stream.read(2) == b"\r\n"
            assert stream.readline() == b"\r\n"
            return Reply(status, headers, b"".join(pieces), pieces)
        body = stream.read(int(headers.get("content-length", "0"))) if has_body else b""
        return Reply(status, headers, body, [])
