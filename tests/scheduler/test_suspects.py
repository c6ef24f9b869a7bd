"""Who is suspected when a worker dies, how suspects are tried, and who is given up."""

import random

import pytest

from headrace_scheduler.decisions import Decisions, LossCause, SchedulerConfig
from headrace_scheduler.scheduler import Scheduler
from headrace_scheduler.sequence import SUSPECT_AT
from headrace_scheduler.suspects import MARGIN_TOKENS, QUARANTINED
from headrace_shared.codec import unpack_ids
from headrace_shared.messages import FinishReason, Outcome, RequestId, WorkerId
from headrace_shared.record_messages import LossRecord
from tests.scheduler.builders import (
    NOW,
    W1,
    W2,
    add,
    admissions,
    admitted_names,
    advance,
    facts,
    report,
    request,
    scheduler,
    snapshot,
    step,
)
from tests.scheduler.model_fleet import Link, ModelFleet

W3 = WorkerId("worker-3")


def fail(made: Scheduler, worker: WorkerId, cause: LossCause = LossCause.FAILED) -> Decisions:
    """The worker is gone, and the losses are stored. Returns what is decided then."""
    made.worker_lost(worker, NOW, cause)
    decisions = step(made)
    for request_id, _ in decisions.losses:
        made.recorded(request_id, NOW)
    later = step(made)
    return Decisions({**decisions.credits, **later.credits}, decisions.ended + later.ended, decisions.losses)


def test_suspects_are_tried_alone_one_after_the_other_and_whoever_got_least_far_comes_first() -> None:
    made = scheduler(facts())
    add(made, request("r1", max_tokens=60), request("r2", max_tokens=60))
    assert admitted_names(step(made)) == ["r1", "r2"]
    advance(made, 1, 41, 7, 8)
    advance(made, 2, 40, 7)
    made.add_worker(W2, facts(), (), NOW)
    assert admitted_names(fail(made, W1), W2) == ["r2"]
    add(made, request("r3"))
    assert admitted_names(step(made), W2) == []
    advance(made, 3, 41 + MARGIN_TOKENS, *range(MARGIN_TOKENS), worker=W2)
    # r2 is acquitted. Now r1 wants to be alone: r2 makes way, and r3 does not even come.
    decisions = step(made)
    assert (decisions.credits[W2].releases, admitted_names(decisions, W2)) == ([3], [])
    report(made, worker=W2, released=(3,))
    assert admitted_names(step(made), W2) == ["r1"]
    advance(made, 4, 42 + MARGIN_TOKENS, *range(MARGIN_TOKENS), worker=W2)
    assert admitted_names(step(made), W2) == ["r2", "r3"]


def test_a_suspect_that_loses_its_worker_again_is_given_up_and_its_batch_mates_go_on() -> None:
    made = scheduler(facts(), config=SchedulerConfig(max_losses=8))
    add(made, request("poison", max_tokens=60), request("mate", max_tokens=60))
    step(made)
    advance(made, 2, 41, 7, 8)
    made.add_worker(W2, facts(), (), NOW)
    assert admitted_names(fail(made, W1), W2) == ["poison"]
    made.add_worker(W3, facts(), (), NOW)
    assert admitted_names(step(made), W3) == []  # half of the workers are for suspects, not more
    decisions = fail(made, W2)
    [ended] = decisions.ended
    assert (ended.event.request_id, ended.event.outcome, ended.event.code) == ("poison", Outcome.FAILED, QUARANTINED)
    assert ended.dead is not None and ended.dead.losses == ("worker-1: failed", "worker-2: failed")
    assert ended.dead.num_prompt_tokens == 40 and ended.dead.request is not None
    [admission] = admissions(decisions, W3)
    assert (admission.request.request_id, list(unpack_ids(admission.output))) == ("mate", [7, 8])


def test_a_conviction_spares_the_others_their_trial() -> None:
    made = scheduler(facts())
    add(made, *(request(f"r{number}", max_tokens=60, salt=str(number)) for number in range(1, 5)))
    step(made)
    for sequence_id in (2, 3, 4):
        advance(made, sequence_id, 41, 7, 8)
    made.add_worker(W2, facts(), (), NOW)
    assert admitted_names(fail(made, W1), W2) == ["r1"]
    made.add_worker(W3, facts(), (), NOW)
    decisions = fail(made, W2)
    assert [ended.event.request_id for ended in decisions.ended] == ["r1"]
    assert admitted_names(decisions, W3) == ["r2", "r3", "r4"] and made.gauges().num_trials == 0
    # One of them kills a worker as well: it was spared for another's deed, not for its own.
    made.add_worker(W1, facts(), (), NOW)
    assert len(admitted_names(fail(made, W3))) == 1 and made.gauges().num_trials == 1


def test_nobody_waits_for_the_suspects_of_another_worker() -> None:
    made = scheduler(facts(), facts(), facts())
    add(made, request("r1", max_tokens=60), request("r2", max_tokens=60, salt="x"), request("r3", salt="y"))
    step(made)
    decisions = fail(made, W1)
    busy = [worker for worker in (W2, W3) if made.gauges().workers[worker].num_running]
    assert len(busy) == 1 and made.gauges().num_trials == 1
    add(made, request("r4", salt="z"))
    again = step(made)
    assert [name for worker in (W2, W3) for name in admitted_names(again, worker)] == ["r4"]
    assert sum(len(credit.releases) for credit in decisions.credits.values()) == 1


def test_a_request_touches_no_other_worker_before_its_loss_is_stored() -> None:
    made = scheduler(facts(), facts())
    add(made, request("r1", max_tokens=60))
    step(made)
    made.worker_lost(W1, NOW, LossCause.FAILED, "the engine process ended with exit code 7")
    decisions = step(made)
    reasons = ("worker-1: the engine process ended with exit code 7",)
    assert decisions.losses == [("r1", LossRecord(num_losses=1, suspicion=SUSPECT_AT, reasons=reasons))]
    assert decisions.credits == {} and step(made).credits == {}
    made.recorded(RequestId("r1"), NOW)
    assert admitted_names(step(made), W2) == ["r1"]


def test_what_was_stored_counts_for_the_next_owner() -> None:
    made = scheduler(facts())
    record = LossRecord(num_losses=1, suspicion=SUSPECT_AT, reasons=("worker-0: failed",))
    made.add_request(request("r0"), "ack", 1, 1, NOW)
    made.add_request(request("r1"), "ack", 2, 2, NOW, {}, record)
    decisions = step(made)
    assert admitted_names(decisions) == ["r1"]
    assert (admissions(decisions)[0].num_losses, admissions(decisions)[0].suspicion) == (1, SUSPECT_AT)
    [ended] = fail(made, W1).ended
    assert ended.dead is not None and ended.dead.losses == ("worker-0: failed", "worker-1: failed")


def test_a_successor_goes_on_with_a_trial() -> None:
    made = scheduler(facts())
    made.add_request(request("r1", max_tokens=60), "ack", 2, 2, NOW, {}, LossRecord(num_losses=1, suspicion=SUSPECT_AT))
    [admission] = admissions(step(made))
    successor = Scheduler()
    successor.add_worker(W1, facts(), (snapshot(admission, 7),), NOW)
    add(successor, request("r2"))
    assert admitted_names(step(successor)) == []
    [ended] = fail(successor, W1).ended
    assert (ended.event.request_id, ended.event.code) == ("r1", QUARANTINED)


def test_whoever_has_just_made_way_may_have_been_it() -> None:
    made = scheduler(facts(), facts(), facts())
    add(made, request("r1", max_tokens=60), request("r2", max_tokens=60, salt="x"), request("r3", salt="y"))
    step(made)
    made.set_accepting(W3, False)
    decisions = fail(made, W1)
    assert decisions.credits[W2].releases == [2]  # for r1; but the worker dies before it has let go
    decisions = fail(made, W2)
    assert {name for name, record in decisions.losses if record.suspicion >= SUSPECT_AT} >= {"r2"}


def test_workers_that_vanish_make_suspects_only_after_several() -> None:
    """Kills from outside must not cost anybody a trial, let alone more."""
    made = scheduler(facts())
    add(made, request("r1", max_tokens=60), request("r2", max_tokens=60))
    for number in range(1, SUSPECT_AT):
        step(made)
        assert made.gauges().workers[WorkerId(f"worker-{number}")].num_running == 2
        made.add_worker(WorkerId(f"worker-{number + 1}"), facts(), (), NOW)
        fail(made, WorkerId(f"worker-{number}"), LossCause.VANISHED)
        assert made.gauges().num_trials == 0
    last = WorkerId(f"worker-{SUSPECT_AT}")
    made.add_worker(WorkerId("worker-9"), facts(), (), NOW)
    assert len(fail(made, last, LossCause.VANISHED).losses) == 2
    assert made.gauges().num_trials == 1 and made.gauges().workers[WorkerId("worker-9")].num_running == 1


def test_a_worker_that_was_told_to_leave_speaks_against_nobody() -> None:
    made = scheduler(facts())
    add(made, request("r1", max_tokens=60))
    for number in range(1, 20):
        assert admitted_names(step(made), WorkerId(f"worker-{number}")) == ["r1"]
        made.add_worker(WorkerId(f"worker-{number + 1}"), facts(), (), NOW)
        made.worker_lost(WorkerId(f"worker-{number}"), NOW, LossCause.HANDED_OVER)
        assert not made.gauges().num_trials


def test_choices_of_a_suspect_are_tried_together() -> None:
    made = scheduler(facts())
    add(made, request("r1", num_choices=2, max_tokens=60), request("r2"))
    step(made)
    made.add_worker(W2, facts(), (), NOW)
    decisions = fail(made, W1)
    while not (tried := admitted_names(decisions, W2)) or tried == ["r2"]:
        advance(made, 3, 40, *range(19), finish=FinishReason.LENGTH, worker=W2, released=True)
        decisions = step(made)
    assert tried == ["r1"]
    [first] = admissions(decisions, W2)
    advance(made, first.sequence_id, 40, 1, worker=W2)
    [second] = admissions(step(made), W2)
    assert (second.request.request_id, second.choice) == ("r1", 1)
    advance(made, first.sequence_id, 56, *range(16), worker=W2)
    assert made.gauges().num_trials == 1  # the other one has yet to get there
    advance(made, second.sequence_id, 56, *range(16), worker=W2)
    assert made.gauges().num_trials == 0


def test_each_acquittal_makes_the_next_trial_longer() -> None:
    made = scheduler(facts())
    add(made, request("r1", max_tokens=400))
    step(made)
    made.add_worker(W2, facts(), (), NOW)
    fail(made, W1)
    advance(made, 2, 39 + MARGIN_TOKENS, *range(MARGIN_TOKENS), worker=W2)
    made.add_worker(W3, facts(), (), NOW)
    step(made)
    assert made.gauges().num_trials == 0
    fail(made, W2)
    advance(made, 3, 40 + 2 * MARGIN_TOKENS, *range(MARGIN_TOKENS + 1), worker=W3)
    assert made.gauges().num_trials == 1


def test_a_trial_ends_with_its_request() -> None:
    made = scheduler(facts(), facts())
    add(made, request("r1", max_tokens=60))
    step(made)
    fail(made, W1)
    made.give_up(RequestId("r1"), "an operator said so", NOW)
    add(made, request("r2"))
    decisions = step(made)
    assert admitted_names(decisions, W2) == ["r2"] and made.gauges().num_trials == 0
    assert decisions.ended[0].dead is not None and decisions.ended[0].dead.reason == "an operator said so"


class PoisonFleet(ModelFleet):
    """Workers die when a poisonous request's answer gets to a certain length."""

    def __init__(self, poison: dict[str, int], num_workers: int) -> None:
        super().__init__(SchedulerConfig(max_losses=1_000), [facts(num_blocks=64, block_size=4)], depth=2)
        self.poison = poison
        self.killed_by: list[str] = []
        for _ in range(num_workers):
            self.start_worker()

    def turn(self) -> None:
        super().turn()
        for link in list(self.links.values()):
            culprits = self.culprits(link)
            if culprits:
                self.killed_by += culprits
                self.kill_worker(link, LossCause.FAILED)
                self.start_worker()

    def culprits(self, link: Link) -> list[str]:
        return [
            name
            for name, num_output in link.worker.running_outputs()
            if name in self.poison and num_output >= self.poison[name]
        ]


@pytest.mark.parametrize("seed", range(12))
def test_poison_costs_two_workers_each_and_nobody_else_is_given_up(seed: int) -> None:
    chance = random.Random(seed)
    names = [f"request-{number}" for number in range(chance.randint(3, 14))]
    poison = {name: chance.randint(0, 14) for name in names if chance.random() < 0.25}
    fleet = PoisonFleet(poison, num_workers=chance.randint(1, 4))
    for name in names:
        prompt = [chance.randrange(3) for _ in range(chance.randint(1, 12))]
        fleet.send(request(name, prompt, max_tokens=16, num_choices=chance.randint(1, 2), seed=chance.randrange(64)))
        for _ in range(chance.randint(0, 4)):
            fleet.turn()
    fleet.settle()
    codes = {name: message.ended.code for name, message in fleet.messages.items() if message.ended is not None}
    for name in names:
        assert fleet.killed_by.count(name) <= 2
        if name not in poison:
            assert codes[RequestId(name)] == "", (name, poison, fleet.killed_by)
