"""Ending background tasks for certain."""

import asyncio
from typing import Any

AGAIN_S = 0.1


async def end(task: "asyncio.Task[Any]") -> None:
    """Cancels the task and waits for its end, whatever it raises. Cancels again as long as it goes on: libraries
    swallow cancellations, as `asyncio.wait_for` itself does before Python 3.12."""
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=AGAIN_S)
    if not task.cancelled():
        task.exception()  # marks it as seen


async def done_before(stop: asyncio.Event, work: "asyncio.Task[Any]") -> bool:
    """Whether `work` came to its end before the event; it has been ended otherwise. Raises what it raised."""
    stopping = asyncio.create_task(stop.wait(), name="stopping")
    try:
        await asyncio.wait((work, stopping), return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            work.result()
        return work.done()
    finally:
        await end(work)
        await end(stopping)
