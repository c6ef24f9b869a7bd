"""From how many workers there should be, and what there is, to what is to be done. Pure: time is an argument.

One `Reconciler` for each model. It may be lost at any moment: all that matters is read off the engine and the workers
again, so that the next leader goes on where the last one died.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from headrace_autoscaler.actions import Action
from headrace_autoscaler.driver import Instance
from headrace_autoscaler.failures import Failures
from headrace_autoscaler.ledger import Ledger
from headrace_autoscaler.matching import Matching, Target
from headrace_autoscaler.repair import Bounds, repair
from headrace_autoscaler.standing import Phase, Standing
from headrace_shared.fleet_messages import CommandKind
from headrace_shared.messages import WorkerId


class Counts(NamedTuple):
    """Workers by where they stand."""

    ready: int = 0
    coming: int = 0
    """Those asked for that no engine shows yet count too."""
    parked: int = 0
    parking: int = 0
    leaving: int = 0
    coming_since: tuple[float, ...] = ()
    """When those on their way set out; of those that are promoted, nothing."""


class Plan(NamedTuple):
    actions: list[Action]
    counts: Counts


class Reconciler:
    def __init__(self, new_id: Callable[[], WorkerId], bounds: Bounds) -> None:
        """`new_id`: a name that no worker has had."""
        self._new_id = new_id
        self._bounds = bounds
        self._ledger = Ledger()
        self.failures = Failures()

    @property
    def warm_up_s(self) -> float:
        """From a start to a loaded worker, as measured of late; 0: not yet."""
        return self._ledger.warm_up_s

    def look(self, standings: Sequence[Standing], now: float, *, shown_at: float) -> Counts:
        """What there is, before anything is planned. `shown_at`: when the engine was asked."""
        return self._count(self._ledger.note(standings, now, shown_at), now)

    def plan(
        self, target: Target, standings: Sequence[Standing], now: float, *, shown_at: float, heard_for_s: float
    ) -> Plan:
        """`heard_for_s`: how long whatever the workers say has been heard without a gap."""
        known = self._ledger.note(standings, now, shown_at)
        removals, self.failures = repair(
            self._ledger, self.failures, known, now, heard_for_s=heard_for_s, bounds=self._bounds
        )
        broken = {removal.instance.key for removal in removals}
        sound = [each for each in known if each.instance is None or each.instance.key not in broken]
        matching = Matching(self._ledger, self.failures, sound, now, self._new_id, self._bounds.stop_grace_s)
        return Plan([*removals, *matching.match(target)], self._count(sound, now))

    def start_succeeded(self, worker: WorkerId, instance: Instance, now: float) -> None:
        self.failures = self.failures.roomy()
        if instance.worker != worker:
            self._ledger.rename(worker, now)

    def start_put_off(self, worker: WorkerId) -> None:
        """Nothing was begun, and nothing is on its way."""
        self._ledger.forget_launch(worker)

    def start_failed(self, worker: WorkerId, what: str, now: float, *, is_full: bool) -> None:
        """`is_full`: there was no room. What exists of it all the same is seen at the next look."""
        self.failures = self.failures.full(what, now) if is_full else self.failures.failed(what, now)
        self._ledger.launched.pop(worker, None)

    def _count(self, standings: Sequence[Standing], now: float) -> Counts:
        promoted = [
            each
            for each in standings
            if each.phase in (Phase.PARKED, Phase.PARKING) and self._ledger.was_told(each.worker, CommandKind.PROMOTE)
        ]
        by_phase = {phase: [each for each in standings if each.phase is phase] for phase in Phase}
        launched = [launch.at for launch in self._ledger.launched.values() if not launch.is_parked]
        shown = [now - self._ledger.age_s(each, now) for each in by_phase[Phase.COMING]]
        num_launched = self._ledger.num_launched(standings, is_parked=False)
        return Counts(
            ready=len(by_phase[Phase.READY]),
            coming=len(by_phase[Phase.COMING]) + len(promoted) + num_launched,
            parked=len([each for each in by_phase[Phase.PARKED] if each not in promoted]),
            parking=len([each for each in by_phase[Phase.PARKING] if each not in promoted]),
            leaving=len(by_phase[Phase.LEAVING]),
            coming_since=tuple(sorted([*launched, *shown])),
        )
