"""What is remembered of a model's workers between two plans. All of it may be lost: it is read off them again. Pure."""

from collections.abc import Sequence
from typing import NamedTuple

from headrace_autoscaler.standing import Phase, Standing
from headrace_shared.fleet_messages import CommandKind, WorkerState
from headrace_shared.messages import WorkerId

LAUNCH_S = 60.0
"""After a start was asked for, the engine shows the worker within this time, or never."""
REFUSAL_S = 30.0
"""A worker that is ready so long after it was told to go was not allowed to."""
PROMOTION_S = 15.0
"""A worker that is told to be ready is so within this time, or will not be."""


class Launch(NamedTuple):
    at: float
    is_parked: bool
    renamed_at: float | None = None


class Told(NamedTuple):
    kind: CommandKind
    at: float


class Ledger:
    def __init__(self) -> None:
        self.launched: dict[WorkerId, Launch] = {}
        """Asked for, and not running yet."""
        self.warm_up_s = 0.0
        """From a start to a loaded worker, as measured of late; 0: not yet."""
        self._launched_at: dict[WorkerId, float] = {}
        """Of those that have not loaded yet, and that we have started ourselves."""
        self._parked: set[WorkerId] = set()
        """Started for the warm pool."""
        self._seen_at: dict[str, float] = {}
        self._ready_at: dict[WorkerId, float] = {}
        self._leaving_at: dict[WorkerId, float] = {}
        self._told: dict[WorkerId, Told] = {}
        self._ending: set[str] = set()
        """Instances whose end is accounted for."""

    def note(self, standings: Sequence[Standing], now: float, shown_at: float) -> list[Standing]:
        """Takes what was there at `shown_at`; returns it with what only we know: what becomes of those that have not
        spoken."""
        keys = {each.instance.key for each in standings if each.instance is not None}
        workers = {each.worker for each in standings}
        running = {each.worker for each in standings if each.phase is not Phase.CREATED}
        self.launched = {
            worker: launch
            for worker, launch in self.launched.items()
            if worker not in running
            and now - launch.at < LAUNCH_S
            and (launch.renamed_at is None or launch.renamed_at > shown_at)
        }
        self._parked &= workers | self.launched.keys()
        self._measure(standings, now)
        self._ending &= keys
        self._seen_at = {key: self._seen_at.get(key, now) for key in keys}
        self._ready_at = self._since(self._ready_at, standings, (Phase.READY,), now)
        self._leaving_at = self._since(self._leaving_at, standings, (Phase.LEAVING, Phase.PARKING), now)
        ready = {each.worker for each in standings if each.phase is Phase.READY}
        self._told = {
            worker: told
            for worker, told in self._told.items()
            if worker in workers and not (worker in ready and self._is_settled(told, now))
        }
        return [self._known(each) for each in standings]

    def launch(self, worker: WorkerId, now: float, *, is_parked: bool) -> None:
        self.launched[worker] = Launch(now, is_parked)
        self._launched_at.setdefault(worker, now)
        if is_parked:
            self._parked.add(worker)

    def forget_launch(self, worker: WorkerId) -> None:
        """It was planned and not asked for."""
        self.launched.pop(worker, None)
        self._launched_at.pop(worker, None)
        self._parked.discard(worker)

    def rename(self, worker: WorkerId, now: float) -> None:
        """Its engine has given it another name, and shows it under that from now on."""
        launch = self.launched.get(worker)
        if launch is not None:
            self.launched[worker] = launch._replace(renamed_at=now)

    def num_launched(self, standings: Sequence[Standing], *, is_parked: bool) -> int:
        """Asked for, and not shown by the engine at all."""
        shown = {each.worker for each in standings}
        return sum(launch.is_parked is is_parked for worker, launch in self.launched.items() if worker not in shown)

    def tell(self, worker: WorkerId, kind: CommandKind, now: float) -> None:
        """The time of the first of equal commands counts."""
        told = self._told.get(worker)
        if told is None or told.kind is not kind:
            self._told[worker] = Told(kind, now)

    def was_told(self, worker: WorkerId, kind: CommandKind) -> bool:
        told = self._told.get(worker)
        return told is not None and told.kind is kind

    def told_for_s(self, worker: WorkerId, now: float) -> float:
        told = self._told.get(worker)
        return 0.0 if told is None else now - told.at

    def begin_end(self, standing: Standing) -> bool:
        """Whether it had not begun before."""
        assert standing.instance is not None
        is_new = standing.instance.key not in self._ending
        self._ending.add(standing.instance.key)
        return is_new

    def is_ending(self, standing: Standing) -> bool:
        return standing.instance is not None and standing.instance.key in self._ending

    def age_s(self, standing: Standing, now: float) -> float:
        """Since its engine first showed it to us."""
        return now - self._seen_at.get(standing.instance.key, now) if standing.instance is not None else 0.0

    def ready_for_s(self, worker: WorkerId, now: float) -> float | None:
        """None: it never was."""
        at = self._ready_at.get(worker)
        return None if at is None else now - at

    def leaving_for_s(self, worker: WorkerId, now: float) -> float:
        return now - self._leaving_at.get(worker, now)

    def may_return(self, standing: Standing, now: float) -> bool:
        """It drains because we said so, and can be told to go on instead."""
        is_draining = standing.heard is not None and standing.heard.state is WorkerState.DRAINING
        was_told = self.was_told(standing.worker, CommandKind.DRAIN)
        is_returning = self.was_told(standing.worker, CommandKind.PROMOTE)
        in_time = was_told or (is_returning and self.told_for_s(standing.worker, now) < PROMOTION_S)
        return is_draining and in_time and not standing.is_silent and not self.is_ending(standing)

    def _measure(self, standings: Sequence[Standing], now: float) -> None:
        loaded = {each.worker for each in standings if each.phase in (Phase.READY, Phase.PARKED)}
        for worker in loaded & self._launched_at.keys():
            took_s = now - self._launched_at.pop(worker)
            self.warm_up_s = took_s if not self.warm_up_s else (self.warm_up_s + took_s) / 2
        present = self.launched.keys() | {each.worker for each in standings}
        self._launched_at = {worker: at for worker, at in self._launched_at.items() if worker in present}

    def _known(self, standing: Standing) -> Standing:
        is_ours = standing.phase is Phase.CREATED and standing.worker in self.launched
        if is_ours or (standing.phase is Phase.COMING and standing.heard is None):
            return standing._replace(phase=Phase.PARKING if standing.worker in self._parked else Phase.COMING)
        return standing

    def _since(
        self, known: dict[WorkerId, float], standings: Sequence[Standing], phases: tuple[Phase, ...], now: float
    ) -> dict[WorkerId, float]:
        """Having been ready is remembered of a worker that has ended, until it is removed."""
        return {
            each.worker: known.get(each.worker, now)
            for each in standings
            if each.phase in phases or (each.phase is Phase.EXITED and each.worker in known)
        }

    def _is_settled(self, told: Told, now: float) -> bool:
        return told.kind is CommandKind.PROMOTE or now - told.at > REFUSAL_S
