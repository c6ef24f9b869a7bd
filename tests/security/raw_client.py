"""The broker's protocol by hand: what one user may publish and subscribe to, without a library between."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from headrace_shared.broker import NatsServer
from headrace_shared.broker_config import authorization
from headrace_shared.broker_credentials import ensure_keys, key_path
from headrace_shared.broker_identity import Signer
from headrace_shared.broker_permissions import Role

TIMEOUT_S = 20.0
_VIOLATION = re.compile(r"^-ERR 'Permissions Violation for (?:Publish|Subscription) to \"([^\"]*)\"", re.IGNORECASE)


class RawClient:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def greet(self, options: dict[str, Any]) -> list[str]:
        """What the broker says to a CONNECT with these options, up to its PONG or its last word."""
        return await self.say("CONNECT " + json.dumps({"verbose": False, "pedantic": False, **options}) + "\r\n")

    async def say(self, text: str) -> list[str]:
        """The lines that come back until the broker has dealt with all of it."""
        self._writer.write((text + "PING\r\n").encode())
        lines = []
        async with asyncio.timeout(TIMEOUT_S):
            while (line := (await self._reader.readline()).decode()) not in ("PONG\r\n", ""):
                lines.append(line.rstrip())
        return lines

    async def refused_publications(self, subjects: Iterable[str]) -> set[str]:
        return _refused(await self.say("".join(f"PUB {subject} 0\r\n\r\n" for subject in subjects)))

    async def refused_subscriptions(self, subjects: Iterable[str], queue: str = "") -> set[str]:
        text = "".join(f"SUB {subject} {queue} {number}\r\n" for number, subject in enumerate(subjects))
        lines = await self.say(text)
        await self.say("".join(f"UNSUB {number}\r\n" for number in range(text.count("\n"))))
        return _refused(lines)


def _refused(lines: list[str]) -> set[str]:
    return {match[1] for line in lines if (match := _VIOLATION.match(line))}


@asynccontextmanager
async def raw_client(server: NatsServer) -> AsyncIterator[tuple[RawClient, dict[str, Any]]]:
    """Before it has said who it is, with what the broker tells everybody."""
    reader, writer = await asyncio.open_connection(server.host, server.port, limit=1 << 24)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            info = json.loads((await reader.readline()).split(b" ", 1)[1])
        yield RawClient(reader, writer), info
    finally:
        writer.close()


@asynccontextmanager
async def raw_user(server: NatsServer, keys: Path, role: Role) -> AsyncIterator[RawClient]:
    async with raw_client(server) as (client, info):
        signer = Signer(key_path(keys, role).read_text())
        options = {"nkey": signer.public_key, "sig": signer(info["nonce"]).decode(), "headers": True}
        assert await client.greet(options) == []
        yield client


def guarded_server(folder: Path, **options: Any) -> NatsServer:
    """One that knows the services' users; their keys are in `folder`/keys."""
    public_keys = ensure_keys(folder / "keys")
    access = authorization({role: [key] for role, key in public_keys.items()})
    return NatsServer(folder / "nats", sync_interval="100ms", access=access + options.pop("further", ""), **options)
