"""What a worker is there for: serving, waiting in parking, or leaving; and how it gets from one to the other. Pure.

    loading ──> ready <──> draining ──┬──> leaving
        │         ^                   │
        │         └───── parked <─────┤
        └──────────────────^          └── (rests its engine, then) parked

Commands set a goal, the latest one counts, and each may be repeated. A drain is off again when it is countermanded,
when its scheduler refuses it (nobody else could do the work that waits) or when no scheduler answers. Only what the
machine itself asks for, by a signal, is final.
"""

from enum import Enum

from headrace_shared.fleet_messages import CommandKind, CommandReply, WorkerCommand, WorkerState
from headrace_shared.messages import DrainVerdict, WorkerId

VERDICT_S = 3.0
"""A scheduler that holds the worker answers within a fraction of that."""
SETTLE_S = 0.3
"""A verdict must have stood for so long: should the others be about to leave as well, it is taken back by then."""
MAX_OWED = 16
"""Replies that wait for a verdict; beyond it the oldest command counts as overtaken."""


class Action(Enum):
    """What the process is to do now."""

    REST = "rest"
    """The engine drops what it has and gives up its cache, then `on_rested`. Schedulers are not obeyed any more."""
    WAKE = "wake"
    """Schedulers may have it again."""
    LEAVE = "leave"


GOALS = {
    CommandKind.DRAIN: WorkerState.LEAVING,
    CommandKind.PARK: WorkerState.PARKED,
    CommandKind.PROMOTE: WorkerState.READY,
}


class Duty:
    """Time is monotonic seconds. After each call `take_actions` and `take_replies` tell what follows from it."""

    def __init__(self, worker_id: WorkerId, *, parked: bool, drain_limit_s: float) -> None:
        self._id = worker_id
        self._limit_s = drain_limit_s
        self.state = WorkerState.LOADING
        self.epoch = 0
        """The highest of the commands so far."""
        self._goal = WorkerState.PARKED if parked else WorkerState.READY
        self._is_final = False
        self.is_resting = False
        """The engine is giving up its cache."""
        self._drains_since = 0.0
        self._verdict: DrainVerdict | None = None
        self._granted_at = 0.0
        self._owed: list[WorkerCommand] = []
        self._replies: list[tuple[str, CommandReply]] = []
        self._actions: list[Action] = []

    @property
    def is_parking(self) -> bool:
        """On the way to be parked."""
        return self._goal is WorkerState.PARKED and self.state in (WorkerState.LOADING, WorkerState.DRAINING)

    def take_actions(self) -> list[Action]:
        actions, self._actions = self._actions, []
        return actions

    def take_replies(self) -> list[tuple[str, CommandReply]]:
        """With whom each is for."""
        replies, self._replies = self._replies, []
        return replies

    def on_command(self, command: WorkerCommand, now: float) -> None:
        if command.epoch and command.epoch < self.epoch:
            self._reply(command, False, f"it is of epoch {command.epoch}, and {self.epoch} has commanded since")
            return
        self.epoch = max(self.epoch, command.epoch)
        goal = GOALS[command.kind]
        if self._is_final or self.state is WorkerState.LEAVING:
            self._reply(command, goal is WorkerState.LEAVING, "it leaves for good")
            return
        if goal is not self._goal:
            self._answer(False, "another command came after it")
        self._goal = goal
        self._owed.append(command)
        if len(self._owed) > MAX_OWED:
            self._reply(self._owed.pop(0), False, "another command came after it")
        self._pursue(now)

    def on_signal(self, now: float) -> None:
        """The process was told to end: whatever else is asked, it leaves."""
        self._is_final = True
        self._goal = WorkerState.LEAVING
        self._pursue(now)
        owed, self._owed = self._owed, []
        for command in owed:
            self._reply(command, GOALS[command.kind] is WorkerState.LEAVING, "it leaves for good")

    def on_loaded(self, now: float) -> None:
        """The engine can run: ready, or parked after it has given up its cache."""
        if self._goal is WorkerState.PARKED:
            self._rest()
        elif self._goal is WorkerState.READY:
            self._be_ready("it is ready")

    def on_rested(self, now: float) -> None:
        self.is_resting = False
        self.state = WorkerState.PARKED
        self._pursue(now)

    def on_verdict(self, verdict: DrainVerdict, now: float) -> None:
        """What the scheduler says that holds the worker now."""
        if self.state is not WorkerState.DRAINING or self._is_final or self.is_resting:
            return
        if not verdict.is_granted:
            self._call_off("no other worker is ready, and work waits")
            return
        if self._verdict is None:
            self._granted_at = now
        self._verdict = verdict
        self._accept()

    def on_leaving(self) -> None:
        """The process ends, for whichever reason."""
        self.state = WorkerState.LEAVING
        self._answer(self._goal is WorkerState.LEAVING, "it leaves")

    def tick(self, now: float, *, is_empty: bool) -> None:
        """`is_empty`: it holds no sequence, and everything was told to routers and scheduler."""
        if self.state is not WorkerState.DRAINING or self.is_resting:
            return
        if self._is_final:
            if is_empty:
                self._leave()
        elif self._verdict is None:
            if now - self._drains_since > VERDICT_S:
                self._call_off("no scheduler has answered whether it may")
        elif now - self._granted_at < SETTLE_S:
            return
        elif is_empty or now - self._drains_since > self._limit_s:
            self._finish()  # what runs beyond the limit is left to others

    def _pursue(self, now: float) -> None:
        """From wherever it is, the next step towards the goal."""
        if self.state is WorkerState.LOADING:
            if self._goal is WorkerState.LEAVING:
                self._answer(True, "it leaves without having been ready")
                self._leave()
            elif not self.is_resting:
                self._answer(True, f"it will be {self._goal} once it is loaded")
        elif self.state is WorkerState.READY:
            if self._goal is WorkerState.READY:
                self._answer(True, "it is ready")
            else:
                self.state = WorkerState.DRAINING
                self._drains_since = now
                self._verdict = None
        elif self.state is WorkerState.DRAINING:
            if self._goal is WorkerState.READY:
                if not self.is_resting:  # else once it has rested
                    self._be_ready("it was draining, and does so no more")
            elif self._verdict is not None:
                self._accept()
        elif self.state is WorkerState.PARKED:
            if self._goal is WorkerState.PARKED:
                self._answer(True, "it is parked")
            elif self._goal is WorkerState.READY:
                self._be_ready("it is ready")
            else:
                self._answer(True, "it leaves")
                self._leave()

    def _finish(self) -> None:
        if self._goal is WorkerState.PARKED:
            self._rest()
        else:
            self._leave()

    def _leave(self) -> None:
        self._is_final = True
        self._actions.append(Action.LEAVE)

    def _rest(self) -> None:
        self.is_resting = True
        self._actions.append(Action.REST)

    def _be_ready(self, message: str) -> None:
        self.state = WorkerState.READY
        self._actions.append(Action.WAKE)
        self._answer(True, message)

    def _call_off(self, reason: str) -> None:
        self._goal = WorkerState.READY
        self.state = WorkerState.READY
        self._answer(False, reason)

    def _accept(self) -> None:
        assert self._verdict is not None, "accepted before a verdict"
        how = "are moved to others" if self._verdict.has_others else "run to their end: no other worker is ready"
        self._answer(True, f"it drains; its sequences {how}")

    def _answer(self, is_accepted: bool, message: str) -> None:
        """Every reply that is owed."""
        owed, self._owed = self._owed, []
        for command in owed:
            self._reply(command, is_accepted, message)

    def _reply(self, command: WorkerCommand, is_accepted: bool, message: str) -> None:
        if command.sender:
            reply = CommandReply(
                worker=self._id,
                command_id=command.command_id,
                is_accepted=is_accepted,
                state=self.state,
                message=message,
            )
            self._replies.append((command.sender, reply))
