"""An engine's socket that answers from a script and remembers what reached it."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

from headrace_autoscaler.proxy.engine_socket import EngineSocket
from headrace_autoscaler.proxy.gatekeeper import Gatekeeper
from headrace_autoscaler.proxy.http_server import HttpServer


class Received(NamedTuple):
    method: str
    path: str
    query: dict[str, list[str]]
    headers: dict[str, str]
    body: Any


class ScriptedEngine:
    """Lists and describes `containers`, each of which is what `GET /containers/<id>/json` answers."""

    def __init__(self, containers: Sequence[dict[str, Any]] = (), services: Sequence[dict[str, Any]] = ()) -> None:
        self.containers = list(containers)
        self.services = list(services)
        self.received: list[Received] = []
        self.answer: Callable[[Received], tuple[int, Any]] = self._answer

    @property
    def changes(self) -> list[Received]:
        return [call for call in self.received if call.method not in ("GET", "HEAD")]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        line, *rest = head.split("\r\n")
        method, target, _ = line.split(" ")
        headers = dict(item.lower().split(": ", 1) for item in rest if item)
        data = await reader.readexactly(int(headers.get("content-length", "0")))
        url = urlsplit(target)
        call = Received(method, url.path, parse_qs(url.query), headers, json.loads(data) if data else None)
        self.received.append(call)
        status, answer = self.answer(call)
        body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        writer.write(
            f"HTTP/1.1 {status} X\r\nApi-Version: 1.41\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n".encode()
        )
        writer.write(b"" if method == "HEAD" else body)
        await writer.drain()
        writer.close()

    def _answer(self, call: Received) -> tuple[int, Any]:
        path = "/" + call.path.lstrip("/").partition("/")[2] if call.path.startswith("/v1.") else call.path
        match call.method, path.strip("/").split("/"):
            case "GET" | "HEAD", ["_ping"]:
                return 200, b"OK"
            case "GET", ["version"]:
                return 200, {"ApiVersion": "1.41", "MinAPIVersion": "1.12"}
            case "GET", ["containers", "json"]:
                return 200, [{"Id": found["Id"]} for found in self.containers]
            case "GET", ["containers", name, "json"]:
                named = (found for found in self.containers if name in (found["Id"], found["Name"].strip("/")))
                found = next(named, None)
                return (200, found) if found else (404, {"message": f"No such container: {name}"})
            case "GET", ["services"]:
                return 200, self.services
            case "GET", ["tasks"]:
                return 200, []
            case "GET", ["services", name]:
                return 200, next(found for found in self.services if name == found["ID"])
            case "POST", ["containers", "create"]:
                return 201, {"Id": "f" * 64, "Warnings": []}
            case "POST", ["services", _, "update"]:
                return 200, {"Warnings": None}
            case "POST" | "DELETE", _:
                return 204, b""
        raise AssertionError(call)


@contextlib.asynccontextmanager
async def running_proxy(engine: ScriptedEngine, folder: Path, **options: Any) -> AsyncIterator[int]:
    """The proxy's port on loopback, with `engine` behind it."""
    path = folder / "engine.sock"
    listener = await asyncio.start_unix_server(engine.serve, path)
    settings = {"project": "headrace", "max_managed": 8, "with_swarm": False, **options}
    server = HttpServer(Gatekeeper(EngineSocket(str(path)), **settings).handle)
    try:
        yield await server.start("127.0.0.1", 0)
    finally:
        await server.close()
        listener.close()
