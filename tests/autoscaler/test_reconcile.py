from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_autoscaler.actions import Command, Remove, Start
from headrace_autoscaler.driver import Instance, InstanceState
from headrace_autoscaler.failures import MAX_FAILURES, QUARANTINE_S, Failures
from headrace_autoscaler.matching import Target
from headrace_autoscaler.repair import HELLO_S, SILENCE_S
from headrace_autoscaler.standing import Phase, standings
from headrace_shared.fleet_messages import WorkerState
from headrace_shared.messages import WorkerId
from tests.autoscaler.virtual_engine import VirtualEngine, kinds


def engine(target: int = 1, parked: int = 0) -> VirtualEngine:
    made = VirtualEngine()
    made.target = Target(target, parked)
    return made


def ready(target: int, parked: int = 0) -> VirtualEngine:
    made = engine(target, parked)
    made.settle()
    assert made.num_ready == target and len(made.alive(WorkerState.PARKED)) == parked
    return made


def test_what_is_missing_is_started_once_and_what_is_on_its_way_counts() -> None:
    fleet = engine(3)
    assert kinds(fleet.step()) == ["start"] * 3
    for _ in range(3):
        assert fleet.step() == []
    assert fleet.counts.coming == 3 and fleet.counts.ready == 0
    fleet.settle()
    assert fleet.num_ready == 3 and len(fleet.workers) == 3


def test_the_time_that_a_start_takes_is_measured() -> None:
    fleet = engine(1)
    assert fleet.reconciler.warm_up_s == 0
    fleet.settle()
    assert 20 <= fleet.reconciler.warm_up_s <= 35


def test_the_operators_workers_count_and_are_left_alone() -> None:
    fleet = engine(2)
    fleet.add("theirs-1")
    assert kinds(fleet.step()) == ["start"]
    fleet.settle()
    fleet.target = Target(0)
    fleet.settle()
    assert [each.worker for each in fleet.alive()] == ["theirs-1"]
    assert fleet.step() == []


def test_operators_containers_that_have_not_spoken_are_on_their_way() -> None:
    theirs = [Instance(f"c{n}", WorkerId(""), "tiny", InstanceState.RUNNING, 0.0, None, False) for n in range(2)]
    silent = standings(theirs, {})
    assert [each.phase for each in silent] == [Phase.COMING] * 2


def test_of_too_many_the_idlest_drains_first_and_is_removed_when_it_has_left() -> None:
    fleet = ready(3)
    for number, worker in enumerate(fleet.alive()):
        worker.num_running = 5 - number
    idlest = list(fleet.workers)[-1]
    fleet.target = Target(2)
    assert kinds(fleet.step()) == ["drain"] and isinstance(fleet.actions[0], Command)
    assert fleet.actions[0].worker == idlest
    assert fleet.step() == [] and fleet.counts.leaving == 1
    actions = fleet.step()
    assert kinds(actions) == ["remove"] and isinstance(actions[0], Remove) and actions[0].grace_s == 0
    assert idlest not in fleet.workers and fleet.num_ready == 2
    assert not fleet.reconciler.failures.num


def test_whoever_is_on_its_way_goes_before_those_that_serve() -> None:
    fleet = ready(1)
    fleet.target = Target(3)
    fleet.step()
    fleet.step()
    fleet.target = Target(1)
    fleet.settle(3)
    assert fleet.num_ready == 1 and len(fleet.workers) == 1


def test_the_last_that_takes_requests_stays_while_others_are_still_loading() -> None:
    fleet = ready(1)
    fleet.add("second", WorkerState.LOADING)  # the operator's
    fleet.target = Target(1)
    for _ in range(3):
        assert fleet.step() == []
    fleet.settle()
    assert fleet.num_ready == 1 and "second" in fleet.workers  # now there are two that serve: ours may go


def test_the_last_that_takes_requests_stays_while_work_waits() -> None:
    fleet = ready(1)
    fleet.target = Target(0, has_waiting=True)
    assert fleet.step() == []
    fleet.target = Target(0)
    fleet.settle()
    assert fleet.workers == {}


def test_nothing_is_decreased_while_figures_are_missing() -> None:
    fleet = ready(3, parked=1)
    fleet.target = Target(1, 0, may_decrease=False)
    fleet.settle()
    assert fleet.num_ready == 3 and len(fleet.alive(WorkerState.PARKED)) == 1


def test_a_command_that_is_lost_is_repeated_to_the_same_worker() -> None:
    fleet = ready(3)
    fleet.target = Target(2)
    fleet.loses_commands = True
    told = set()
    for _ in range(4):
        told |= {action.worker for action in fleet.step() if isinstance(action, Command)}
        for worker in fleet.alive():
            worker.num_running += hash(worker.worker) % 7
    assert len(told) == 1
    fleet.loses_commands = False
    fleet.settle()
    assert fleet.num_ready == 2


def test_a_drain_that_is_refused_is_asked_for_again_and_counts_its_time_anew() -> None:
    fleet = ready(2)
    fleet.target = Target(1)
    for worker in fleet.workers.values():
        worker.refuses_drains = True
    for _ in range(30):
        fleet.step()
    assert fleet.num_ready == 2 and "drain" in kinds(fleet.actions)
    for worker in fleet.workers.values():
        worker.refuses_drains = False
    fleet.step()
    assert len(fleet.alive(WorkerState.DRAINING)) == 1
    assert "remove" not in kinds(fleet.step())


def test_a_drain_is_called_off_when_the_worker_is_wanted_again() -> None:
    fleet = ready(2)
    fleet.target = Target(1)
    fleet.step()
    fleet.target = Target(2)
    assert kinds(fleet.step()) == ["promote"]
    fleet.settle()
    assert fleet.num_ready == 2 and len(fleet.workers) == 2


def test_a_worker_that_never_finishes_draining_is_stopped_in_the_end() -> None:
    fleet = ready(2)
    fleet.target = Target(1)
    fleet.step()
    (stuck,) = fleet.alive(WorkerState.DRAINING)
    for _ in range(20):
        stuck.since = fleet.now + 5
        fleet.step()
        stuck.heard_at = fleet.now
    assert stuck.worker not in fleet.workers and fleet.num_ready == 1
    assert not fleet.reconciler.failures.num


def test_the_pool_is_filled_used_first_and_filled_again() -> None:
    fleet = ready(1, parked=2)
    fleet.target = Target(2, 2)
    actions = fleet.step()
    assert kinds(actions) == ["park-start", "promote"]
    assert fleet.num_ready == 2
    fleet.settle()
    assert fleet.num_ready == 2 and len(fleet.alive(WorkerState.PARKED)) == 2 and len(fleet.workers) == 4


def test_a_worker_too_many_goes_into_a_pool_that_has_room() -> None:
    fleet = ready(2)
    fleet.target = Target(1, 1)
    assert kinds(fleet.step()) == ["park"]
    fleet.settle()
    assert fleet.num_ready == 1 and len(fleet.alive(WorkerState.PARKED)) == 1 and len(fleet.workers) == 2
    fleet.target = Target(1, 0)
    fleet.settle()
    assert len(fleet.workers) == 1


def test_a_parked_worker_that_does_not_wake_is_replaced() -> None:
    fleet = ready(1, parked=1)
    (parked,) = fleet.alive(WorkerState.PARKED)
    fleet.target = Target(2)
    fleet.loses_commands = True
    for _ in range(6):
        fleet.step()
    assert parked.worker not in fleet.workers and fleet.counts.coming == 1


def test_what_dies_is_removed_and_replaced_in_the_same_step() -> None:
    fleet = ready(2)
    fleet.settle(20)
    dead = next(iter(fleet.workers.values()))
    dead.exit_code = -9
    assert kinds(fleet.step()) == ["remove", "start"]
    assert not fleet.reconciler.failures.num  # it had lived long enough
    fleet.settle()
    assert fleet.num_ready == 2 and dead.worker not in fleet.workers


def is_quarantined(fleet: VirtualEngine) -> bool:
    failures = fleet.reconciler.failures
    return failures.num >= MAX_FAILURES and fleet.now < failures.not_before


def test_workers_that_die_at_once_are_started_more_and_more_slowly_and_then_hardly_ever() -> None:
    fleet = engine(2)
    fleet.crashes_at_load = True
    num_starts = 0
    for _ in range(120):
        num_starts += kinds(fleet.step()).count("start")
    assert MAX_FAILURES <= num_starts <= MAX_FAILURES + 2
    assert is_quarantined(fleet)
    assert "exit code 1" in fleet.reconciler.failures.last
    fleet.now += QUARANTINE_S
    assert kinds(fleet.step()) == ["start"]  # one, to see
    fleet.crashes_at_load = False
    fleet.settle(40)
    assert fleet.num_ready == 2 and not fleet.reconciler.failures.num


def test_workers_that_are_killed_soon_after_they_are_ready_are_replaced_for_ever() -> None:
    fleet = engine(1)
    num_starts = 0
    for _ in range(200):
        num_starts += kinds(fleet.step()).count("start")
        for worker in fleet.alive(WorkerState.READY):
            worker.exit_code = -9
    assert num_starts > 15 and not is_quarantined(fleet)


def test_a_setting_that_no_worker_can_serve_ends_all_trying_at_once() -> None:
    fleet = engine(1)
    fleet.step()
    next(iter(fleet.workers.values())).exit_code = 2
    assert kinds(fleet.step()) == ["remove"]
    fleet.settle()
    assert fleet.workers == {} and is_quarantined(fleet)


def test_no_room_is_nobodys_fault() -> None:
    failures = Failures().full("all 4 GPUs are taken", now=100.0)
    assert not failures.num and failures.most_starts(0, 3, 102.0) == 0
    assert failures.most_starts(2, 3, 110.0) == 1 and failures.roomy().most_starts(2, 3, 110.0) == 3


def test_a_worker_that_never_speaks_is_replaced() -> None:
    fleet = engine(1)
    fleet.step()
    (mute,) = fleet.workers.values()
    mute.is_frozen = True
    for _ in range(int(HELLO_S / 5) + 1):
        assert fleet.step() == []
    assert kinds(fleet.step()) == ["remove"]
    fleet.settle()
    assert fleet.num_ready == 1


def test_a_worker_that_falls_silent_is_replaced_unless_nobody_is_heard() -> None:
    fleet = ready(2)
    frozen = next(iter(fleet.workers.values()))
    frozen.is_frozen = True
    for _ in range(int(SILENCE_S / 5)):
        fleet.step()
    assert frozen.worker in fleet.workers and fleet.counts == fleet.counts._replace(ready=1, coming=1)
    now = fleet.now + 5
    late = fleet.reconciler.plan(fleet.target, fleet.standings(), now, shown_at=now, heard_for_s=SILENCE_S - 1)
    assert late.actions == []
    fleet.step()
    assert frozen.worker not in fleet.workers


def test_a_start_that_was_cut_off_goes_on_under_the_next_leader() -> None:
    fleet = engine(1)
    fleet.dies_in_start = True
    fleet.step()
    fleet.fail_over()
    assert fleet.step() == [Start(WorkerId("worker-1"))]
    fleet.settle()
    assert fleet.num_ready == 1 and len(fleet.workers) == 1


def test_a_start_that_was_cut_off_and_is_not_wanted_any_more_is_removed() -> None:
    fleet = engine(1)
    fleet.dies_in_start = True
    fleet.step()
    fleet.fail_over()
    fleet.target = Target(0)
    assert kinds(fleet.step()) == ["remove"] and fleet.workers == {}


def test_an_engine_that_gives_names_of_its_own_is_not_asked_twice() -> None:
    fleet = engine(1)
    (start,) = fleet.step()
    assert isinstance(start, Start)
    fleet.workers.clear()
    named = fleet.add("task-7", WorkerState.LOADING, is_managed=True)
    before = fleet.now
    fleet.reconciler.start_succeeded(start.worker, named.instance(), fleet.now + 1)
    # What the engine showed before does not have it yet.
    stale = fleet.reconciler.plan(fleet.target, [], fleet.now + 2, shown_at=before, heard_for_s=1000.0)
    assert stale.actions == [] and stale.counts.coming == 1
    assert fleet.step() == [] and fleet.counts.coming == 1
    fleet.target = Target(2)
    assert kinds(fleet.step()) == ["start"]


def test_a_new_leader_keeps_what_is_there() -> None:
    fleet = ready(2, parked=1)
    fleet.target = Target(3, 1)
    fleet.step()
    fleet.fail_over()
    for _ in range(2):
        fleet.step()
        assert "start" not in kinds(fleet.actions)
    fleet.settle()
    assert fleet.num_ready == 3 and len(fleet.workers) == 4


WISHES = ("up", "down", "zero", "pool", "no-pool", "blind", "sight")
MISHAPS = ("die", "crash", "freeze", "thaw", "lose", "hear", "cut", "refuse", "obey", "fail-over")
EVENTS = st.one_of(st.just("step"), st.sampled_from(WISHES), st.sampled_from(MISHAPS))


@settings(deadline=None, max_examples=80)
@given(st.lists(EVENTS, max_size=60), st.randoms(use_true_random=False))
def test_whatever_happens_it_comes_to_rest_as_it_should(events: list[str], source: Random) -> None:
    fleet = engine(1)
    theirs = fleet.add("theirs")
    most = 1
    for event in events:
        alive = [each for each in fleet.alive() if each.is_managed]
        target = fleet.target
        if event == "step":
            was_ready, may_decrease = fleet.num_ready, target.may_decrease
            before = {each.worker for each in fleet.alive(WorkerState.READY)}
            fleet.step()
            told = [action for action in fleet.actions if isinstance(action, Command | Remove)]
            if not may_decrease:
                assert not {"drain", "park"} & set(kinds(fleet.actions))
            if was_ready and target.serving:
                going = {action.worker for action in told if isinstance(action, Command) and action.kind != "promote"}
                assert before - going, "nobody would take requests any more"
            most = max(most, target.serving + target.parked)
            num_alive = len([each for each in fleet.alive() if each.state is not WorkerState.DRAINING])
            assert num_alive <= most + 2, "far more than were ever wanted"
        elif event == "up":
            fleet.target = target._replace(serving=min(6, target.serving + 1))
        elif event == "down":
            fleet.target = target._replace(serving=max(0, target.serving - 1))
        elif event == "zero":
            fleet.target = target._replace(serving=0)
        elif event in ("die", "crash", "freeze") and alive:
            victim = source.choice(alive)
            if event == "freeze":
                victim.is_frozen = True
            else:
                victim.exit_code = -9 if event == "die" else 1
        elif event == "thaw":
            for each in alive:
                each.is_frozen = False
        elif event in ("lose", "hear"):
            fleet.loses_commands = event == "lose"
        elif event == "cut":
            fleet.dies_in_start = True
        elif event in ("refuse", "obey"):
            fleet.refuses_starts = event == "refuse"
        elif event == "fail-over":
            fleet.fail_over()
        elif event in ("pool", "no-pool"):
            fleet.target = target._replace(parked=2 if event == "pool" else 0)
        elif event in ("blind", "sight"):
            fleet.target = target._replace(may_decrease=event == "sight")
    fleet.loses_commands = fleet.refuses_starts = fleet.dies_in_start = False
    fleet.target = fleet.target._replace(may_decrease=True)
    fleet.settle(2 * int(QUARANTINE_S / 5))
    assert fleet.num_ready == max(1, fleet.target.serving)
    assert theirs in fleet.alive(WorkerState.READY)
    assert len(fleet.alive(WorkerState.PARKED)) == fleet.target.parked
    assert len(fleet.workers) == fleet.num_ready + fleet.target.parked, "something is left over"
    assert fleet.step() == []


def test_workers_that_never_start_are_tried_for_years() -> None:
    failures = Failures(num=100_000).failed("exit code 1", 50.0)
    assert failures.num == 100_001 and failures.not_before == 50.0 + QUARANTINE_S
