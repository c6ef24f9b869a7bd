"""Too few workers or too many: which are started, promoted, parked or sent away. Pure."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from headrace_autoscaler.actions import Action, Command, Remove, Start
from headrace_autoscaler.failures import Failures
from headrace_autoscaler.ledger import Ledger
from headrace_autoscaler.standing import Phase, Standing, in_phase
from headrace_shared.fleet_messages import CommandKind
from headrace_shared.messages import WorkerId


class Target(NamedTuple):
    serving: int
    """Ready or on their way to it."""
    parked: int = 0
    may_decrease: bool = True
    has_waiting: bool = False
    """Requests wait for a worker."""


class Matching:
    """One plan. `standings` are those that nothing is wrong with."""

    def __init__(
        self,
        ledger: Ledger,
        failures: Failures,
        standings: Sequence[Standing],
        now: float,
        new_id: Callable[[], WorkerId],
        stop_grace_s: float,
    ) -> None:
        self._ledger = ledger
        self._failures = failures
        self._now = now
        self._new_id = new_id
        self._stop_grace_s = stop_grace_s
        self._ready = in_phase(standings, Phase.READY)
        self._coming = in_phase(standings, Phase.COMING)
        self._leaving = in_phase(standings, Phase.LEAVING)
        self._cut_off = [each for each in in_phase(standings, Phase.CREATED) if each.is_managed]
        pool = [each for each in in_phase(standings, Phase.PARKED, Phase.PARKING) if each.is_managed]
        self._promoted = [each for each in pool if ledger.was_told(each.worker, CommandKind.PROMOTE)]
        self._parked = [each for each in pool if each not in self._promoted]
        self._num_launched = ledger.num_launched(standings, is_parked=False)
        self._num_launched_parked = ledger.num_launched(standings, is_parked=True)
        self.actions: list[Action] = []

    @property
    def num_serving(self) -> int:
        """Ready, or on their way to it."""
        return len(self._ready) + self.num_coming

    @property
    def num_coming(self) -> int:
        return len(self._coming) + len(self._promoted) + self._num_launched

    def match(self, target: Target) -> list[Action]:
        for each in self._promoted:
            self._command(each, CommandKind.PROMOTE)
        missing = target.serving - self.num_serving
        if missing > 0:
            self._increase(missing)
        else:
            for each in self._cut_off:
                self._discard(each)
            if missing < 0 and target.may_decrease:
                self._decrease(-missing, target)
        self._match_pool(target)
        return self.actions

    def _increase(self, missing: int) -> None:
        """What is there already comes first: workers that drain, the warm pool, starts that were cut off."""
        returning = [each for each in self._leaving if self._ledger.may_return(each, self._now)]
        pool = sorted(self._parked, key=lambda each: each.phase is not Phase.PARKED)
        chosen = [*returning, *pool][:missing]
        for each in chosen:
            self._command(each, CommandKind.PROMOTE)
        self._parked = [each for each in self._parked if each not in chosen]
        allowed = self._failures.most_starts(self.num_coming + len(chosen), missing - len(chosen), self._now)
        for each in self._cut_off[:allowed]:
            self._start(each.worker)
        for each in self._cut_off[allowed:]:
            self._discard(each)
        for _ in range(allowed - len(self._cut_off)):
            self._start(self._new_id())

    def _decrease(self, excess: int, target: Target) -> None:
        """Those on their way first, the youngest first, then whoever has least to do. The last that takes requests
        stays, unless none is wanted."""
        least = 1 if target.serving or target.has_waiting else 0
        coming = sorted(
            (each for each in self._coming if each.is_managed and each.worker and not each.is_silent),
            key=lambda each: self._ledger.age_s(each, self._now),
        )
        ready = sorted((each for each in self._ready if each.is_managed), key=self._reluctance)
        room = target.parked - len(self._parked)
        for each in [*coming, *ready[: max(0, len(self._ready) - least)]][:excess]:
            if room > 0:
                self._command(each, CommandKind.PARK)
                self._parked.append(each)
                room -= 1
            elif each.heard is None:
                self._discard(each)
            else:
                self._command(each, CommandKind.DRAIN)

    def _reluctance(self, standing: Standing) -> tuple[bool, int, float]:
        """Whoever was told before is told again: one that has not heard it yet must not make two of them."""
        was_told = any(self._ledger.was_told(standing.worker, kind) for kind in (CommandKind.DRAIN, CommandKind.PARK))
        num_running = standing.heard.num_running if standing.heard is not None else 0
        return not was_told, num_running, self._ledger.age_s(standing, self._now)

    def _match_pool(self, target: Target) -> None:
        missing = target.parked - len(self._parked) - self._num_launched_parked
        if missing > 0:
            num_coming = self.num_coming + self._num_launched_parked
            for _ in range(self._failures.most_starts(num_coming, missing, self._now)):
                self._start(self._new_id(), is_parked=True)
        elif target.may_decrease:
            surplus = sorted(self._parked, key=lambda each: self._ledger.age_s(each, self._now))
            for each in surplus[: len(self._parked) - target.parked]:
                self._command(each, CommandKind.DRAIN)

    def _command(self, standing: Standing, kind: CommandKind) -> None:
        self._ledger.tell(standing.worker, kind, self._now)
        self.actions.append(Command(standing.worker, kind))

    def _start(self, worker: WorkerId, *, is_parked: bool = False) -> None:
        self._ledger.launch(worker, self._now, is_parked=is_parked)
        self.actions.append(Start(worker, is_parked))

    def _discard(self, standing: Standing) -> None:
        assert standing.instance is not None
        self._ledger.begin_end(standing)
        self.actions.append(Remove(standing.instance, self._stop_grace_s, "it is not wanted any more"))
