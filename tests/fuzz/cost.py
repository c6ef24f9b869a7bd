"""What one call costs: processor time and memory.

A process shares its processor time with other threads, with the garbage collector and with what earlier calls have
begun. So a call has its own thread's time, and one that seems to be expensive is measured again when nothing else is
going on.
"""

import asyncio
import gc
import resource
import time
from typing import NamedTuple

LOOK_S = 0.05
BUSY_SHARE = 0.3
"""Of a look, in processor time: below it the process has nothing to do but its periodic tasks."""
MAX_LOOKS = 200


class Cost(NamedTuple):
    thread_s: float
    """Processor time of the thread that has measured."""
    process_s: float
    """Of all threads."""
    growth_mib: int
    """Of the process' peak of memory."""


class Meter:
    """Measures from when it is made."""

    def __init__(self) -> None:
        self._peak_mib = peak_memory_mib()
        self._thread_s, self._process_s = time.thread_time(), time.process_time()

    def read(self) -> Cost:
        thread_s, process_s = time.thread_time() - self._thread_s, time.process_time() - self._process_s
        return Cost(thread_s, process_s, peak_memory_mib() - self._peak_mib)


def peak_memory_mib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def settle() -> None:
    """Until other threads have done their work, and garbage is gone."""
    gc.collect()
    for _ in range(MAX_LOOKS):
        before = time.process_time()
        time.sleep(LOOK_S)
        if _is_quiet_since(before):
            return


async def settle_loop() -> None:
    """The same for the tasks of this event loop."""
    gc.collect()
    for _ in range(MAX_LOOKS):
        before = time.process_time()
        await asyncio.sleep(LOOK_S)
        if _is_quiet_since(before):
            return


def _is_quiet_since(before: float) -> bool:
    return time.process_time() - before < BUSY_SHARE * LOOK_S
