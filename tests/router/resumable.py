"""Calls that can be resumed, and two routers to resume them at."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

from headrace_router.settings import RouterSettings
from headrace_shared.codec import decode
from headrace_shared.memory_bus import MemoryBus
from headrace_shared.messages import LogMessage, RequestEnded
from headrace_shared.subjects import TOKENS
from tests.byte_model import MODEL
from tests.router.support import Router, Script, running_router

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
RESUMABLE = {"Headrace-Resumable": "true"}
HELD_ID = "headrace-request-id"


class Event(NamedTuple):
    id: str | None
    data: str


def body(path: str, **fields: Any) -> dict[str, Any]:
    asked = {"messages": [{"role": "user", "content": "Hi"}]} if path == CHAT else {"prompt": "Hi"}
    return {"model": MODEL, "stream": True, "max_tokens": 200, **asked, **fields}


def parse(block: str) -> Event | None:
    lines = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
    return Event(lines.get("id"), lines["data"]) if lines else None


def events_of(text: str) -> list[Event]:
    return [event for block in text.split("\n\n") if block and (event := parse(block)) is not None]


class Routers(NamedTuple):
    a: Router
    b: Router

    def ended(self) -> list[RequestEnded]:
        stored = self.a.broker.streams[TOKENS.name].stored.values()
        events: list[LogMessage] = [decode(message.data, LogMessage) for message, _ in stored]
        return [event for event in events if isinstance(event, RequestEnded)]


@contextlib.asynccontextmanager
async def two_routers(script: Script, **settings: Any) -> AsyncIterator[Routers]:
    each = RouterSettings(port=0, drain_delay_s=0.0, drain_timeout_s=5.0, **settings)
    async with running_router(script, settings=each) as a:
        buses = (MemoryBus(a.broker), MemoryBus(a.broker))
        async with running_router(script, settings=each, buses=buses, has_worker=False) as b:
            yield Routers(a, b)
