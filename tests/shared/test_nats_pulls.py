"""Pulls that end in the same moment as a message comes: it is returned by one of them, and soon."""

import asyncio
import random
import time

import pytest

from headrace_shared.nats_bus import NatsBus
from tests.shared.bus_helpers import CONSUMER, SUBJECT, Connect

pytestmark = pytest.mark.nats

NUM_MESSAGES = 300
SOON_S = 15.0
"""Far below the time after which an unacknowledged message is offered again."""


@pytest.mark.parametrize("num_pullers", [1, 4])
async def test_no_message_is_lost_to_a_pull_that_expires(bus: NatsBus, connect: Connect, num_pullers: int) -> None:
    """Messages are sent when a pull is about to expire, and now and then the event loop is blocked so long that the
    broker's word of it comes late."""
    producer = await connect()
    chance = random.Random(num_pullers)
    took_s: list[float] = []

    async def pull() -> None:
        while len(took_s) < NUM_MESSAGES:
            delivery = await bus.pull(CONSUMER, chance.uniform(0.002, 0.02))
            if delivery is not None:
                took_s.append(time.monotonic() - float(delivery.data))
                await bus.acknowledge(delivery.ack_subject)

    async def produce() -> None:
        for number in range(NUM_MESSAGES):
            await asyncio.sleep(chance.uniform(0.0, 0.02))
            if number % 50 == 49:
                time.sleep(0.6)  # noqa: ASYNC251 - longer than a pull waits for the broker's word
            await producer.enqueue(SUBJECT, repr(time.monotonic()).encode(), message_id=str(number))

    async with asyncio.timeout(60.0), asyncio.TaskGroup() as group:
        for _ in range(num_pullers):
            group.create_task(pull())
        group.create_task(produce())
    assert len(took_s) == NUM_MESSAGES
    assert max(took_s) < SOON_S
    assert await bus.num_messages("REQUESTS") == 0
