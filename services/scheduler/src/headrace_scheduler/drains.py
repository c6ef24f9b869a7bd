"""Workers that want to leave, or to be parked: whether they may, and where their sequences go.

One that nobody could replace stays for as long as work waits. Whoever may go is emptied after a moment: short sequences
end where they are, the others continue on other workers from the tokens that they have. Where no other worker is ready
they run to their end.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import structlog

from headrace_scheduler.fleet import Fleet
from headrace_scheduler.scheduler import Scheduler
from headrace_shared.beats import beat
from headrace_shared.errors import BusError
from headrace_shared.messages import WorkerId

LOOK_S = 0.1
REPEAT_S = 1.0
"""Verdicts may be lost."""

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Drain:
    since: float
    epoch: int = 0
    """Of the lease under which the last verdict was said."""
    verdict: tuple[bool, bool] | None = None
    said_at: float = 0.0
    moved_at: float | None = None
    """When the core was last told to move its sequences."""


class Drains:
    """`num_queued` counts requests that wait where no scheduler of ours holds them; it may raise a BusError, and nobody
    gets a verdict then. `core` is asked anew each time."""

    def __init__(
        self,
        core: Callable[[], Scheduler],
        fleet: Fleet,
        num_queued: Callable[[], Awaitable[int]],
        move_after_s: float,
        wake: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self._core = core
        self._fleet = fleet
        self._num_queued = num_queued
        self._move_after_s = move_after_s
        self._wake = wake
        self._clock = clock
        self._drains: dict[WorkerId, _Drain] = {}

    async def run(self) -> None:
        while True:
            await self.look()
            await beat(LOOK_S)

    async def look(self) -> None:
        """To be called several times a second."""
        links = self._fleet.draining()
        self._drains = {worker_id: self._drains.get(worker_id) or _Drain(self._clock()) for worker_id in links}
        if not links:
            return
        has_others = self._fleet.num_ready > 0
        try:
            is_granted = has_others or not (self._core().num_waiting or await self._num_queued())
        except BusError as error:
            log.info("nobody leaves: the queue is not readable", error=str(error))
            return
        verdict = (is_granted, has_others)
        for worker_id, link in links.items():
            drain, now = self._drains[worker_id], self._clock()
            if verdict != drain.verdict or link.epoch != drain.epoch or now - drain.said_at >= REPEAT_S:
                if verdict != drain.verdict:
                    log.info("worker drains", worker=worker_id, is_granted=is_granted, has_others=has_others)
                drain.verdict, drain.epoch, drain.said_at = verdict, link.epoch, now
                link.judge(is_granted=is_granted, has_others=has_others)
            # Told again and again, since the core may be a new one.
            is_due = drain.moved_at is None or now - drain.moved_at >= REPEAT_S
            if has_others and now - drain.since >= self._move_after_s and is_due:
                drain.moved_at = now
                self._core().evacuate(worker_id)
                self._wake()
