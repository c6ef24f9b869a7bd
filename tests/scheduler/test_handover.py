"""Letting go of a worker and of all that runs on it."""

from headrace_scheduler.scheduler import Scheduler
from headrace_shared.messages import FinishReason, RequestId
from tests.scheduler.builders import (
    NOW,
    W1,
    W2,
    add,
    admissions,
    admitted_names,
    advance,
    facts,
    request,
    scheduler,
    snapshot,
    step,
)


def test_a_worker_goes_with_its_requests_and_nobody_is_told_of_an_end() -> None:
    made = scheduler(facts(max_sequences=1), facts(max_sequences=1))
    add(made, request("r1", max_tokens=60), request("r2", max_tokens=60), request("r3"))
    [admission] = admissions(step(made))
    advance(made, 1, 41, 7, 8)
    assert made.hand_over(W1, NOW)
    assert step(made) == ({}, [], []) and set(made.gauges().workers) == {W2}
    assert [name for name, _ in made.ack_subjects()] == ["r2", "r3"]
    peer = Scheduler()
    adoption = peer.add_worker(W1, facts(max_sequences=1), (snapshot(admission, 7, 8, num_computed=41),), NOW)
    assert adoption.adopted == ("r1",)
    advance(peer, 1, 42, 9, finish=FinishReason.STOP, released=True)
    assert len(step(peer).ended) == 1


def test_what_was_let_go_runs_if_it_comes_back() -> None:
    made = scheduler(facts(), facts())
    add(made, request("r1"))
    step(made)
    assert made.hand_over(W1, NOW)
    add(made, request("r1"))
    assert admitted_names(step(made), W2) == ["r1"]
    made.let_go(RequestId("r1"))
    add(made, request("r1"))
    assert "r1" in [name for name, _ in made.ack_subjects()]


def test_a_worker_with_a_request_that_runs_elsewhere_too_is_kept() -> None:
    made = scheduler(facts(max_sequences=1), facts(max_sequences=1))
    add(made, request("r1", num_choices=2, max_tokens=60))
    [first] = admissions(step(made))
    advance(made, first.sequence_id, 40, 1)
    assert admitted_names(step(made), W2) == ["r1"]
    assert not made.can_hand_over(W1) and not made.hand_over(W1, NOW)
    advance(made, 2, 41, 1, 2, finish=FinishReason.STOP, worker=W2, released=True)
    assert made.can_hand_over(W1)


def test_a_worker_is_kept_while_an_admission_is_under_way() -> None:
    made = scheduler(facts())
    add(made, request("r1"))
    assert not made.can_hand_over(W2)
    made.set_accepting(W1, False)
    made.schedule(NOW)
    assert made.can_hand_over(W1)
