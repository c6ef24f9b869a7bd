"""Moving the sequences of a draining worker, in the core."""

from headrace_scheduler.decisions import Decisions, LossCause
from headrace_scheduler.scheduler import Scheduler
from headrace_shared.codec import unpack_ids
from headrace_shared.messages import WorkerId
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
    step,
)

W3 = WorkerId("worker-3")


def drain(made: Scheduler, worker: WorkerId = W1) -> None:
    made.set_accepting(worker, False)
    made.evacuate(worker)


def left(made: Scheduler, *sequence_ids: int, worker: WorkerId = W1) -> Decisions:
    """The worker has let them go."""
    report(made, worker=worker, released=sequence_ids)
    return step(made)


def releases(decisions: Decisions, worker: WorkerId = W1) -> list[int]:
    return list(decisions.credits[worker].releases) if worker in decisions.credits else []


def test_sequences_go_on_elsewhere_with_what_they_have_said() -> None:
    made = scheduler(facts())
    add(made, request("r1", max_tokens=60), request("r2", max_tokens=60))
    step(made)
    advance(made, 1, 42, 7, 8, 9)
    made.add_worker(W2, facts(), (), NOW)
    drain(made)
    decisions = step(made)
    assert releases(decisions) == [1, 2]
    assert admissions(decisions, W2) == [], "who knows what they have said meanwhile"
    advance(made, 1, 43, 10)
    assert admissions(step(made), W2) == []
    moved = admissions(left(made, 1, 2), W2)
    assert [admission.request.request_id for admission in moved] == ["r1", "r2"]
    assert unpack_ids(moved[0].output).tolist() == [7, 8, 9, 10] and moved[0].attempt == 1
    assert made.gauges().num_moved == 2 and made.gauges().num_losses == 0


def test_only_what_finds_a_place_is_moved_and_the_rest_runs_on() -> None:
    made = scheduler(facts(max_sequences=4))
    add(made, *(request(f"r{number}", max_tokens=60) for number in range(4)))
    step(made)
    made.add_worker(W2, facts(max_sequences=1), (), NOW)
    drain(made)
    assert releases(step(made)) == [1]
    assert releases(step(made)) == [], "the place is the first one's"
    assert admitted_names(left(made, 1), W2) == ["r0"]
    assert made.gauges().num_waiting == 0 and made.gauges().workers[W1].num_running == 3
    advance(made, 5, 42, 7, 8, 9, worker=W2)
    assert releases(step(made)) == []  # still no place
    made.worker_lost(W2, NOW, LossCause.HANDED_OVER)
    made.add_worker(W3, facts(max_sequences=16), (), NOW)
    decisions = step(made)
    assert releases(decisions) == [2, 3, 4] and admitted_names(decisions, W3) == ["r0"]
    assert set(admitted_names(left(made, 2, 3, 4), W3)) == {"r1", "r2", "r3"}


def test_who_runs_is_moved_before_the_queue_is_served() -> None:
    made = scheduler(facts())
    add(made, request("r1", max_tokens=60))
    step(made)
    made.add_worker(W2, facts(max_sequences=1), (), NOW)
    drain(made)
    add(made, request("r2"))
    assert admitted_names(step(made), W2) == []
    assert admitted_names(left(made, 1), W2) == ["r1"]


def test_nothing_moves_without_a_worker_that_accepts() -> None:
    made = scheduler(facts(), facts())
    add(made, request("r1", max_tokens=60))
    step(made)
    made.set_accepting(W2, False)
    drain(made)
    assert releases(step(made)) == [] and made.gauges().num_running == 1
    made.set_accepting(W2, True)
    assert releases(step(made)) == [1] and admitted_names(left(made, 1), W2) == ["r1"]


def test_a_worker_that_is_called_back_keeps_what_it_has() -> None:
    made = scheduler(facts())
    add(made, request("r1", max_tokens=60))
    step(made)
    drain(made)
    made.set_accepting(W1, True)
    made.evacuate(W1)  # too late: it accepts again
    made.add_worker(W2, facts(), (), NOW)
    assert releases(step(made)) == [] and made.gauges().workers[W1].num_running == 1


def test_choices_go_together_and_share_the_prompt_again() -> None:
    made = scheduler(facts())
    add(made, request("r1", num_choices=3, max_tokens=60))
    step(made)
    advance(made, 1, 40, 5)
    step(made)
    assert made.gauges().num_running == 3
    made.add_worker(W2, facts(), (), NOW)
    drain(made)
    decisions = step(made)
    assert releases(decisions) == [1, 2, 3]
    [first] = admissions(left(made, 1, 2, 3), W2)
    assert (first.choice, first.num_cached) == (0, 0)
    advance(made, first.sequence_id, 41, 6, worker=W2)
    others = admissions(step(made), W2)
    assert [other.choice for other in others] == [1, 2] and all(other.num_cached for other in others)


def test_in_the_middle_of_a_prompt() -> None:
    made = scheduler(facts())
    add(made, request("r1", prompt=400, max_tokens=60))
    step(made)
    advance(made, 1, 256)
    made.add_worker(W2, facts(), (), NOW)
    drain(made)
    decisions = step(made)
    assert releases(decisions) == [1] and admitted_names(left(made, 1), W2) == ["r1"]


def test_a_suspect_gets_another_trial_elsewhere() -> None:
    made = scheduler(facts(), facts())
    add(made, request("r1", max_tokens=60))
    step(made)
    made.worker_lost(W1, NOW, LossCause.FAILED)
    made.recorded(step(made).losses[0][0], NOW)
    assert admitted_names(step(made), W2) == ["r1"]
    made.add_worker(W3, facts(), (), NOW)
    drain(made, W2)
    assert releases(step(made), W2) == [2]
    advance(made, 2, 0, worker=W2, released=True)
    step(made)
    assert admitted_names(step(made), W3) == ["r1"] or made.gauges().workers[W3].num_running == 1


def test_readoption_goes_on_with_the_drain() -> None:
    made = scheduler(facts())
    drain(made)
    made.add_worker(W1, facts(), (), NOW)
    made.add_worker(W2, facts(), (), NOW)
    add(made, request("r1"))
    assert admitted_names(step(made), W2) == ["r1"]
