"""How requests ended, as the token log, the queue and the metrics tell."""

import asyncio
from typing import Any

from headrace_shared.codec import decode
from headrace_shared.messages import LogMessage, Outcome, RequestEnded
from headrace_shared.telemetry import REQUESTS_IN_FLIGHT
from tests.router.support import Router, until


def ended_events(router: Router) -> list[RequestEnded]:
    events: list[Any] = [
        decode(message.data, LogMessage) for message, _ in router.broker.streams["TOKENS"].stored.values()
    ]
    return [event for event in events if isinstance(event, RequestEnded)]


async def assert_clean(router: Router, outcome: Outcome = Outcome.CANCELLED) -> None:
    await until(lambda: not router.broker.streams["REQUESTS"].stored)
    await until(lambda: [event.outcome for event in ended_events(router)] == [outcome])
    # Nothing more comes.
    await asyncio.sleep(0.3)
    assert [event.outcome for event in ended_events(router)] == [outcome]
    metrics = (await router.client.get("/metrics")).text
    assert f"{REQUESTS_IN_FLIGHT.name} 0.0" in metrics
