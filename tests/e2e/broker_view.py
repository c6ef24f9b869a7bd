"""What the broker holds, seen from outside the product."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import nats
from nats.js import JetStreamContext

from headrace_shared.codec import decode
from headrace_shared.messages import LogMessage, RequestEnded, TokenFrame


class BrokerView:
    def __init__(self, js: JetStreamContext) -> None:
        self._js = js

    async def num_queued(self) -> int:
        return int((await self._js.stream_info("REQUESTS")).state.messages)

    async def num_ever_queued(self) -> int:
        return int((await self._js.stream_info("REQUESTS")).state.last_seq)

    async def token_log(self) -> list[tuple[str, RequestEnded | TokenFrame]]:
        """Everything in the token log: (subject, event), oldest first."""
        events: list[tuple[str, RequestEnded | TokenFrame]] = []
        state = (await self._js.stream_info("TOKENS")).state
        if state.messages:
            subscription = await self._js.subscribe("tokens.>", ordered_consumer=True)
            while True:
                message = await subscription.next_msg(timeout=10)
                events.append((message.subject, decode(message.data, LogMessage)))
                if message.metadata.sequence.stream >= state.last_seq:
                    break
            await subscription.unsubscribe()
        return events


@asynccontextmanager
async def broker_view(url: str) -> AsyncIterator[BrokerView]:
    connection = await nats.connect(url)
    try:
        yield BrokerView(connection.jetstream())
    finally:
        await connection.close()
