"""Gives workers to peers that have less than their share, with all that runs on them: no sequence starts again.

One worker at a time. It gets no new sequences; once it has confirmed every admission, its lease is given up, and the
peer finds all of it in the snapshot.
"""

from collections.abc import Callable, Mapping

from headrace_scheduler.scheduler import Scheduler
from headrace_scheduler.worker_link import WorkerLink
from headrace_shared.messages import WorkerId

PATIENCE_S = 2.0
"""A share that is exceeded for so long is given away. Doubles each time that the worker comes back, since its peer did
not want it."""
MAX_PATIENCE_S = 64.0
COMEBACK_S = 6.0
SETTLE_S = 2.0
"""A worker that cannot be given up for so long, since requests run here and there, say, is tried again later."""


class Handover:
    """`core` is asked anew each time, since it may have been replaced."""

    def __init__(self, core: Callable[[], Scheduler]) -> None:
        self._core = core
        self._worker_id: WorkerId | None = None
        """Chosen, and told nothing new."""
        self._since = 0.0
        self._in_excess_since: float | None = None
        self._patience_s = PATIENCE_S
        self._given: tuple[WorkerId, float] | None = None
        """The last one, and when."""

    def is_chosen(self, worker_id: WorkerId) -> bool:
        return worker_id == self._worker_id

    def step(self, links: Mapping[WorkerId, WorkerLink], share: int, now: float) -> WorkerId | None:
        """To be called several times a second with the active links. Returns the worker to be given up now: the core
        has let go of it."""
        self._look_back(links, now)
        if len(links) <= share:
            self._in_excess_since = None
            self._stop()
            return None
        if self._in_excess_since is None:
            self._in_excess_since = now
        if self._worker_id is not None:
            return self._continue(links.get(self._worker_id), now)
        if now - self._in_excess_since >= self._patience_s:
            self._start(links, now)
        return None

    def _start(self, links: Mapping[WorkerId, WorkerLink], now: float) -> None:
        core = self._core()
        able = [worker_id for worker_id in links if core.can_hand_over(worker_id)]
        if able:
            # The idlest first: what is most likely to settle soon.
            loads = core.gauges().workers
            self._worker_id = min(able, key=lambda worker_id: (loads[worker_id].num_running, worker_id))
            self._since = now
            core.set_accepting(self._worker_id, False)

    def _continue(self, link: WorkerLink | None, now: float) -> WorkerId | None:
        worker_id = self._worker_id
        assert worker_id is not None
        if link is None or now - self._since > SETTLE_S:
            self._stop()
            self._in_excess_since = now
        elif link.is_settled and self._core().hand_over(worker_id, now):
            self._worker_id = None
            self._in_excess_since = now
            self._given = (worker_id, now)
            return worker_id
        return None

    def _look_back(self, links: Mapping[WorkerId, WorkerLink], now: float) -> None:
        if self._given is None:
            return
        worker_id, given_at = self._given
        if worker_id in links:
            self._given = None
            self._patience_s = min(2 * self._patience_s, MAX_PATIENCE_S)
        elif now - given_at > COMEBACK_S:
            self._given = None
            self._patience_s = PATIENCE_S

    def _stop(self) -> None:
        """Its next Hello lets it have new sequences again."""
        self._worker_id = None
