"""Time for which processes could have computed but had no core: on a machine with too much to do, an engine that takes
long does not hang."""

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

Delays = Mapping[int, float]
"""Of each thread, by its id: for how many seconds in all it was ready to run and waited for a core."""


class Starvation:
    """What a group of processes missed, lap by lap. A thread that is stopped, or waits for another one that hangs,
    waits for no core: its time is not excused. Pure but for `delays`."""

    def __init__(self, delays: Callable[[], Delays]) -> None:
        self._delays = delays
        self._known: Delays = {}
        self._lap_began_at: float | None = None

    def reset(self) -> None:
        """Nothing is late: the next lap is to begin with the next call."""
        self._lap_began_at = None

    def lap(self, now: float) -> float:
        """For how long of the time since the last call one of the threads waited for a core: what the others need may
        have been its result. 0 for the first call."""
        began_at, self._lap_began_at = self._lap_began_at, now
        before, self._known = self._known, self._delays()
        if began_at is None:
            return 0.0
        most = max((seconds - before.get(thread, 0.0) for thread, seconds in self._known.items()), default=0.0)
        return max(0.0, min(most, now - began_at))


def run_delays(pids: Iterable[int]) -> dict[int, float]:
    """Of all threads of these processes, as Linux counts them; empty where the system does not tell."""
    delays: dict[int, float] = {}
    for pid in pids:
        tasks = f"/proc/{pid}/task"
        try:
            threads = os.listdir(tasks)
        except OSError:  # it has ended, or there is no such file system
            continue
        for thread in threads:
            try:
                _, waited_ns, _ = Path(tasks, thread, "schedstat").read_text(encoding="ascii").split()
            except (OSError, ValueError):  # the thread has ended, or the kernel does not count
                continue
            delays[int(thread)] = int(waited_ns) / 1e9
    return delays
