"""What becomes of commands, verdicts and signals. Each test reads as a history."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_shared.fleet_messages import CommandKind, CommandReply, WorkerCommand, WorkerState
from headrace_shared.messages import DrainVerdict, WorkerId
from headrace_worker.duty import GOALS, MAX_OWED, SETTLE_S, VERDICT_S, Action, Duty

WORKER = WorkerId("worker-1")
LIMIT_S = 60.0
GRANTED = DrainVerdict(worker=WORKER, epoch=1, is_granted=True, has_others=True)
ALONE = DrainVerdict(worker=WORKER, epoch=1, is_granted=True)
REFUSED = DrainVerdict(worker=WORKER, epoch=1, is_granted=False)
DRAIN, PARK, PROMOTE = CommandKind.DRAIN, CommandKind.PARK, CommandKind.PROMOTE


class Bench:
    """The duty of a worker, the replies that it gave, and whether its engine rests and the process is to end."""

    def __init__(self, *, parked: bool = False, loaded: bool = True) -> None:
        self.duty = Duty(WORKER, parked=parked, drain_limit_s=LIMIT_S)
        self.now = 100.0
        self.is_empty = True
        self.actions: list[Action] = []
        self.replies: list[CommandReply] = []
        self.num_commands = 0
        if loaded:
            self.duty.on_loaded(self.now)
            self.take()
            if parked:
                self.rested()

    def is_in(self, state: WorkerState) -> bool:
        return self.duty.state is state

    def command(self, kind: CommandKind, epoch: int = 0) -> str:
        self.num_commands += 1
        command_id = f"{kind}-{self.num_commands}"
        command = WorkerCommand(worker=WORKER, kind=kind, command_id=command_id, sender="me", epoch=epoch)
        self.duty.on_command(command, self.now)
        self.take()
        return command_id

    def verdict(self, verdict: DrainVerdict) -> None:
        self.duty.on_verdict(verdict, self.now)
        self.take()

    def rested(self) -> None:
        assert self.actions[-1] is Action.REST
        self.duty.on_rested(self.now)
        self.take()

    def tick(self, seconds: float = 0.5) -> list[Action]:
        before = len(self.actions)
        self.now += seconds
        self.duty.tick(self.now, is_empty=self.is_empty)
        self.take()
        return self.actions[before:]

    def take(self) -> None:
        self.actions += self.duty.take_actions()
        for sender, reply in self.duty.take_replies():
            assert sender == "me"
            self.replies.append(reply)

    def answers(self) -> list[tuple[str, bool]]:
        return [(reply.command_id, reply.is_accepted) for reply in self.replies]


def test_a_drained_worker_leaves_once_it_may_and_is_empty() -> None:
    bench = Bench()
    bench.is_empty = False
    asked = bench.command(DRAIN)
    assert bench.is_in(WorkerState.DRAINING) and bench.replies == []
    bench.verdict(GRANTED)
    assert bench.answers() == [(asked, True)] and "moved to others" in bench.replies[0].message
    assert bench.tick() == []
    bench.is_empty = True
    assert bench.tick() == [Action.LEAVE]


def test_an_empty_worker_waits_for_the_verdict_as_well() -> None:
    bench = Bench()
    bench.command(DRAIN)
    assert bench.tick() == [] and bench.is_in(WorkerState.DRAINING)
    bench.verdict(ALONE)
    assert "to their end" in bench.replies[0].message
    assert bench.tick() == [Action.LEAVE]


def test_a_verdict_that_is_taken_back_at_once_lets_nobody_go() -> None:
    """Two schedulers grant two drains at once, before each has heard of the other's."""
    bench = Bench()
    bench.command(DRAIN)
    bench.verdict(GRANTED)
    assert bench.tick(SETTLE_S / 2) == []
    bench.verdict(REFUSED)
    assert bench.tick() == [] and bench.is_in(WorkerState.READY)


def test_a_refused_drain_is_off() -> None:
    bench = Bench()
    asked = bench.command(DRAIN)
    bench.verdict(REFUSED)
    assert bench.is_in(WorkerState.READY) and bench.answers() == [(asked, False)]
    assert bench.tick(1000.0) == [] and bench.is_in(WorkerState.READY)


def test_a_drain_that_nobody_judges_is_off() -> None:
    bench = Bench()
    asked = bench.command(PARK)
    bench.tick(VERDICT_S + 0.1)
    assert bench.is_in(WorkerState.READY) and bench.answers() == [(asked, False)]


def test_work_that_comes_meanwhile_calls_the_last_worker_back() -> None:
    bench = Bench()
    bench.is_empty = False
    bench.command(DRAIN)
    bench.verdict(ALONE)
    bench.tick(5.0)
    bench.verdict(REFUSED)
    assert bench.is_in(WorkerState.READY)
    bench.is_empty = True
    assert bench.tick() == []


def test_what_runs_beyond_the_limit_is_left_behind() -> None:
    bench = Bench()
    bench.is_empty = False
    bench.command(DRAIN)
    bench.verdict(ALONE)
    assert bench.tick(LIMIT_S - 1.0) == []
    assert bench.tick(2.0) == [Action.LEAVE]


def test_parking_while_sequences_run_waits_for_them_then_for_the_engine() -> None:
    bench = Bench()
    bench.is_empty = False
    asked = bench.command(PARK)
    assert bench.duty.is_parking
    bench.verdict(GRANTED)
    assert bench.tick() == [] and bench.answers() == [(asked, True)]
    bench.is_empty = True
    assert bench.tick() == [Action.REST]
    assert bench.is_in(WorkerState.DRAINING) and bench.tick() == []
    bench.rested()
    assert bench.is_in(WorkerState.PARKED) and not bench.duty.is_parking


def test_promoted_twice_is_promoted_once() -> None:
    bench = Bench(parked=True)
    first, second = bench.command(PROMOTE), bench.command(PROMOTE)
    assert bench.is_in(WorkerState.READY)
    assert bench.answers() == [(first, True), (second, True)]
    assert bench.actions.count(Action.WAKE) == 1


def test_promoted_while_it_goes_to_rest() -> None:
    bench = Bench()
    bench.command(PARK)
    bench.verdict(GRANTED)
    assert bench.tick() == [Action.REST]
    asked = bench.command(PROMOTE)
    assert bench.is_in(WorkerState.DRAINING)  # the engine is not back yet
    assert asked not in dict(bench.answers())
    bench.rested()
    assert bench.is_in(WorkerState.READY) and bench.answers()[-1] == (asked, True)
    assert bench.actions[-1] is Action.WAKE


@pytest.mark.parametrize("kind", [DRAIN, PARK])
def test_a_promotion_countermands(kind: CommandKind) -> None:
    bench = Bench()
    asked, countermanded = bench.command(kind), bench.command(PROMOTE)
    assert bench.is_in(WorkerState.READY)
    assert bench.answers() == [(asked, False), (countermanded, True)]


def test_a_worker_that_starts_parked_is_never_ready_before() -> None:
    bench = Bench(parked=True, loaded=False)
    assert bench.is_in(WorkerState.LOADING) and bench.duty.is_parking
    bench.duty.on_loaded(bench.now)
    bench.take()
    assert bench.is_in(WorkerState.LOADING) and bench.actions == [Action.REST]
    bench.rested()
    assert bench.is_in(WorkerState.PARKED)
    bench.command(DRAIN)
    assert bench.actions[-1] is Action.LEAVE


def test_commands_while_it_loads_hold_afterwards() -> None:
    bench = Bench(loaded=False)
    assert bench.command(PARK) and bench.answers() == [("park-1", True)]
    bench.duty.on_loaded(bench.now)
    bench.take()
    bench.rested()
    assert bench.is_in(WorkerState.PARKED)
    leaving = Bench(loaded=False)
    leaving.command(DRAIN)
    assert leaving.actions == [Action.LEAVE]


def test_a_lower_epoch_than_seen_is_refused_and_an_operator_never() -> None:
    bench = Bench(parked=True)
    bench.command(PROMOTE, epoch=4)
    old = bench.command(PARK, epoch=3)
    assert bench.is_in(WorkerState.READY) and bench.answers()[-1] == (old, False)
    assert bench.duty.epoch == 4
    bench.command(PARK)
    assert bench.is_in(WorkerState.DRAINING) and bench.duty.epoch == 4
    bench.command(PROMOTE, epoch=4)
    assert bench.is_in(WorkerState.READY)


def test_a_signal_is_final() -> None:
    bench = Bench()
    bench.is_empty = False
    parked = bench.command(PARK)
    bench.duty.on_signal(bench.now)
    bench.take()
    assert bench.answers() == [(parked, False)]
    promoted, drained = bench.command(PROMOTE), bench.command(DRAIN)
    assert bench.answers()[1:] == [(promoted, False), (drained, True)]
    bench.verdict(REFUSED)
    assert bench.is_in(WorkerState.DRAINING)
    assert bench.tick(VERDICT_S + LIMIT_S + 1.0) == []  # the process has a time limit of its own
    bench.is_empty = True
    assert bench.tick() == [Action.LEAVE]


def test_a_signal_ends_a_parked_worker_at_once() -> None:
    bench = Bench(parked=True)
    bench.duty.on_signal(bench.now)
    bench.take()
    assert bench.actions[-1] is Action.LEAVE


def test_replies_that_are_owed_are_bounded() -> None:
    bench = Bench()
    for _ in range(MAX_OWED + 3):
        bench.command(DRAIN)
    assert bench.answers() == [(f"drain-{number}", False) for number in (1, 2, 3)]
    bench.verdict(GRANTED)
    assert len(bench.replies) == MAX_OWED + 3 and all(reply.is_accepted for reply in bench.replies[3:])


steps = st.lists(
    st.sampled_from(
        ["drain", "park", "promote", "granted", "alone", "refused", "empty", "busy", "tick", "late", "rested"]
    )
)


@given(steps, st.booleans())
def test_whatever_happens_each_command_is_answered_once_and_the_last_goal_is_reached(
    history: Sequence[str], parked: bool
) -> None:
    bench = Bench(parked=parked)
    sent: list[str] = []

    def is_resting() -> bool:
        return bench.actions.count(Action.REST) > num_rested

    num_rested = int(parked)
    for step in history:
        if step in ("drain", "park", "promote"):
            sent.append(bench.command(CommandKind(step)))
        elif step in ("granted", "alone", "refused"):
            bench.verdict({"granted": GRANTED, "alone": ALONE, "refused": REFUSED}[step])
        elif step in ("empty", "busy"):
            bench.is_empty = step == "empty"
        elif step == "rested" and is_resting():
            num_rested += 1
            bench.duty.on_rested(bench.now)
            bench.take()
        elif step in ("tick", "late"):
            bench.tick(0.5 if step == "tick" else 10.0)
        assert len(bench.answers()) == len({command_id for command_id, _ in bench.answers()})
        if bench.is_in(WorkerState.PARKED):
            assert not is_resting()
    last = bench.command(PROMOTE)
    sent.append(last)
    if is_resting():
        bench.duty.on_rested(bench.now)
        bench.take()
    has_left = Action.LEAVE in bench.actions
    assert bench.is_in(WorkerState.READY) is not has_left and bench.answers()[-1] == (last, not has_left)
    assert {command_id for command_id, _ in bench.answers()} == set(sent)


def test_every_command_has_a_goal() -> None:
    assert set(GOALS) == set(CommandKind)
