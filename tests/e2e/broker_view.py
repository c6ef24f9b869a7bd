"""What the broker holds, seen with the rights of a scheduler."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from headrace_shared.broker_permissions import Role
from headrace_shared.codec import decode
from headrace_shared.messages import LogMessage, RequestEnded, TokenFrame
from headrace_shared.nats_bus import NatsBus
from headrace_shared.subjects import REQUESTS, TOKENS
from tests.e2e.launcher import Launched

MAX_EVENTS = 1_000_000


class BrokerView:
    def __init__(self, bus: NatsBus) -> None:
        self._bus = bus

    async def num_queued(self) -> int:
        return await self._bus.num_messages(REQUESTS)

    async def num_ever_queued(self) -> int:
        answer: dict[str, Any] = await self._bus._streams.must(f"STREAM.INFO.{REQUESTS}")
        return int(answer["state"]["last_seq"])

    async def token_log(self) -> list[tuple[str, RequestEnded | TokenFrame]]:
        """Everything in the token log: (subject, event), oldest first."""
        messages = await self._bus.read(TOKENS.name, "tokens.*.*", MAX_EVENTS)
        return [(message.subject, decode(message.data, LogMessage)) for message in messages]


@asynccontextmanager
async def broker_view(system: Launched) -> AsyncIterator[BrokerView]:
    bus = await system.bus(Role.SCHEDULER)
    try:
        yield BrokerView(bus)
    finally:
        await bus.close()
