"""Repeating what may be repeated while the broker is away."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog

from headrace_shared.errors import BusRefused, BusUnavailable, OutcomeUnknown

PATIENCE_S = 15.0
"""For a broker that is away in the middle: a cluster may elect for 9 s."""
RETRY_S = 0.1
MAX_RETRY_S = 1.0

T = TypeVar("T")

log = structlog.get_logger(__name__)


async def patiently(
    call: Callable[[], Awaitable[T]], patience_s: float = PATIENCE_S, max_retry_s: float = MAX_RETRY_S
) -> T:
    """Pauses grow from RETRY_S to `max_retry_s`. Raises the last BusError, and BusRefused at once."""
    now = asyncio.get_running_loop().time
    until = now() + patience_s
    retry_s, is_told = RETRY_S, False
    while True:
        try:
            return await call()
        except BusRefused:
            raise
        except (BusUnavailable, OutcomeUnknown) as error:
            if now() >= until:
                raise
            if not is_told:
                log.info("the broker is not there; trying again", error=str(error))
            is_told = True
        await asyncio.sleep(retry_s)
        retry_s = min(max_retry_s, 2 * retry_s)
