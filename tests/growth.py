"""How work grows with its size: two sizes in one run, so that it does not matter how fast the machine is."""

import time
from collections.abc import Callable

SIZES = 1, 16
"""Of the small and the large work."""
MOST = 5.0 * SIZES[1] / SIZES[0]
"""What grows in proportion takes 16 times as long, give or take caches and a moment's luck; with the square of the size
it takes 256 times."""
NUM_RUNS = 3


def assert_proportional(work_of: Callable[[int], Callable[[], object]]) -> None:
    """`work_of(size)` prepares work of a size. The least of a few measurements of the processor's time counts, since
    others on the machine can only make them longer."""
    small_s, large_s = (min(_thread_s(work) for _ in range(NUM_RUNS)) for work in map(work_of, SIZES))
    assert large_s < MOST * small_s, (small_s, large_s)


def _thread_s(work: Callable[[], object]) -> float:
    began_at = time.thread_time()
    work()
    return time.thread_time() - began_at
