"""Periodic work that falls together: on one machine everybody wakes at the same moments, the multiples of his period.

A service has a dozen timers. Each one that goes off by itself takes a core from whoever computes there, for cold caches
and a few microseconds of work; and each message sent by itself wakes the broker and whoever it is for.
"""

import asyncio
import time

NEAR = 0.125
"""Of a period: a beat that is so near is left out. Timers are coarse, and may go off a little early."""


def until_beat(period_s: float, now: float, near: float = NEAR) -> float:
    """Seconds until the next multiple of the period, or the one after it where that is `near`: `near` to 1 + `near`
    periods. `now`: monotonic."""
    left_s = period_s - now % period_s
    return left_s if left_s > near * period_s else left_s + period_s


async def beat(period_s: float) -> None:
    """Sleeps about so long, once; in a loop: exactly so long on average, however long the work takes in between."""
    await asyncio.sleep(until_beat(period_s, time.monotonic()))
