"""What the tests of the bus share."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple, Protocol

from headrace_shared.broker import NatsServer
from headrace_shared.bus import Bus
from headrace_shared.messages import Lane
from headrace_shared.nats_bus import NatsBus
from headrace_shared.subjects import BucketSpec, ConsumerSpec
from tests.patience import PATIENCE_S
from tests.queues import request_subject

SUBJECT = request_subject("m", Lane.INTERACTIVE, 0)
CONSUMER = ConsumerSpec("REQUESTS", "m-interactive", "requests.m.interactive.*", ack_wait_s=30.0, max_ack_pending=100)
BUCKET = BucketSpec("B", max_bytes=1024 * 1024)


class Pair(NamedTuple):
    """Two connections to one broker."""

    a: Bus
    b: Bus


class Connect(Protocol):
    """Makes connections that the fixture closes."""

    def __call__(self) -> Awaitable[NatsBus]: ...


async def until(condition: Callable[[], object], timeout_s: float = PATIENCE_S) -> float:
    """Seconds until it held."""
    started = time.monotonic()
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - conditions of any kind
            await asyncio.sleep(0.01)
    return time.monotonic() - started


async def pause(server: NatsServer) -> None:
    server.pause()
    await asyncio.sleep(0.1)  # all its threads
