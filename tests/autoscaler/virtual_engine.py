"""An engine and its workers in virtual time, for tests of the reconciler: they start, load, serve, park, drain, die."""

from collections.abc import Iterable
from dataclasses import dataclass

from headrace_autoscaler.actions import Action, Command, Remove, Start
from headrace_autoscaler.driver import Instance, InstanceState
from headrace_autoscaler.matching import Target
from headrace_autoscaler.reconcile import Counts, Reconciler
from headrace_autoscaler.repair import Bounds
from headrace_autoscaler.standing import Heard, Standing, standings
from headrace_shared.fleet_messages import CommandKind, WorkerState
from headrace_shared.messages import WorkerId

LOAD_S = 20.0
DRAIN_S = 10.0
BOUNDS = Bounds(stop_grace_s=5.0, drain_limit_s=60.0)


@dataclass
class VirtualWorker:
    worker: WorkerId
    is_managed: bool = True
    is_running: bool = True
    """False: created only."""
    state: WorkerState | None = None
    """None: it has not said hello."""
    is_parking: bool = False
    since: float = 0.0
    """Of the state."""
    heard_at: float = 0.0
    exit_code: int | None = None
    num_running: int = 0
    is_frozen: bool = False
    refuses_drains: bool = False

    def instance(self) -> Instance:
        state = InstanceState.RUNNING if self.is_running else InstanceState.CREATED
        return Instance(
            key=f"key-{self.worker}",
            worker=self.worker,
            model="tiny",
            state=state if self.exit_code is None else InstanceState.EXITED,
            started_at=0.0,
            exit_code=self.exit_code,
            is_managed=self.is_managed,
        )


class VirtualEngine:
    """`step` lets time pass and the reconciler act; what it does is applied at once unless it is said to be lost."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.workers: dict[WorkerId, VirtualWorker] = {}
        self.target = Target(1)
        self.reconciler = self.new_reconciler()
        self.actions: list[Action] = []
        """Of the last step."""
        self.counts = Counts()
        self.loses_commands = False
        self.dies_in_start = False
        """The next start is cut off: the instance is created and does not run."""
        self.refuses_starts = False
        self.crashes_at_load = False
        self._num_ids = 0

    def new_reconciler(self) -> Reconciler:
        def new_id() -> WorkerId:
            self._num_ids += 1
            return WorkerId(f"worker-{self._num_ids}")

        return Reconciler(new_id, BOUNDS)

    def fail_over(self) -> None:
        """Another leader, who remembers nothing."""
        self.reconciler = self.new_reconciler()

    def add(self, worker: str, state: WorkerState = WorkerState.READY, *, is_managed: bool = False) -> VirtualWorker:
        made = VirtualWorker(WorkerId(worker), is_managed, state=state, since=self.now, heard_at=self.now)
        self.workers[made.worker] = made
        return made

    def alive(self, *states: WorkerState) -> list[VirtualWorker]:
        return [
            each for each in self.workers.values() if each.exit_code is None and (each.state in states or not states)
        ]

    @property
    def num_ready(self) -> int:
        return len(self.alive(WorkerState.READY))

    def standings(self) -> list[Standing]:
        heard = {
            each.worker: Heard(each.state, self.now - each.heard_at, each.is_parking, each.num_running)
            for each in self.workers.values()
            if each.state is not None
        }
        return standings([each.instance() for each in self.workers.values() if each.is_managed], heard)

    def step(self, seconds: float = 5.0) -> list[Action]:
        self.now += seconds
        self._live()
        plan = self.reconciler.plan(self.target, self.standings(), self.now, shown_at=self.now, heard_for_s=1000.0)
        self.actions, self.counts = plan.actions, plan.counts
        for action in plan.actions:
            self._apply(action)
        return plan.actions

    def settle(self, steps: int = 12) -> None:
        for _ in range(steps):
            self.step()

    def _live(self) -> None:
        for each in self.workers.values():
            if each.exit_code is not None or not each.is_running or each.is_frozen:
                continue
            age_s = self.now - each.since
            if each.state is None:
                self._enter(each, WorkerState.LOADING)
            elif each.state is WorkerState.LOADING and age_s >= LOAD_S:
                if self.crashes_at_load:
                    each.exit_code = 1
                    continue
                self._enter(each, WorkerState.PARKED if each.is_parking else WorkerState.READY)
                each.is_parking = False
            elif each.state is WorkerState.DRAINING and age_s >= DRAIN_S:
                if each.is_parking:
                    self._enter(each, WorkerState.PARKED)
                    each.is_parking = False
                else:
                    each.exit_code = 0
            each.heard_at = self.now

    def _enter(self, worker: VirtualWorker, state: WorkerState) -> None:
        worker.state, worker.since = state, self.now

    def _apply(self, action: Action) -> None:
        if isinstance(action, Start):
            self._start(action)
        elif isinstance(action, Remove):
            assert action.instance.is_managed, "the operator's workers are not ours to remove"
            self.workers.pop(action.instance.worker, None)
        elif not self.loses_commands:
            self._command(action)

    def _start(self, start: Start) -> None:
        if self.refuses_starts:
            self.reconciler.start_failed(start.worker, "the engine says no", self.now, is_full=False)
            return
        known = self.workers.get(start.worker)
        if known is not None:
            known.is_running = True
            return
        made = VirtualWorker(start.worker, is_parking=start.is_parked, is_running=not self.dies_in_start)
        made.since = self.now
        self.workers[start.worker] = made
        self.dies_in_start = False

    def _command(self, command: Command) -> None:
        worker = self.workers.get(command.worker)
        if worker is None or worker.exit_code is not None or worker.state is None or worker.is_frozen:
            return
        assert worker.is_managed, "the operator's workers are not ours to command"
        if command.kind is CommandKind.PROMOTE:
            if worker.state is WorkerState.LOADING:
                worker.is_parking = False
            elif worker.state in (WorkerState.PARKED, WorkerState.DRAINING):
                self._enter(worker, WorkerState.READY)
                worker.is_parking = False
        elif worker.state is WorkerState.LOADING and command.kind is CommandKind.PARK:
            worker.is_parking = True
        elif worker.state in (WorkerState.LOADING, WorkerState.PARKED) and command.kind is CommandKind.DRAIN:
            worker.exit_code = 0
        elif worker.state is WorkerState.READY and not worker.refuses_drains:
            self._enter(worker, WorkerState.DRAINING)
            worker.is_parking = command.kind is CommandKind.PARK


def kinds(actions: Iterable[Action]) -> list[str]:
    """start, park-start, remove, drain, park, promote."""
    names = []
    for action in actions:
        if isinstance(action, Command):
            names.append(action.kind.value)
        elif isinstance(action, Start):
            names.append("park-start" if action.is_parked else "start")
        else:
            names.append("remove")
    return sorted(names)
