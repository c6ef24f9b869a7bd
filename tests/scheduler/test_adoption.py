"""Lost workers, snapshots and successors: who runs where afterwards, under which attempt, with which tokens."""

from msgspec.structs import replace

from headrace_scheduler.decisions import AddResult, Adoption, ChoiceLog, LossCause, SchedulerConfig
from headrace_scheduler.scheduler import Scheduler
from headrace_shared.codec import unpack_ids
from headrace_shared.messages import (
    Admission,
    CancelReason,
    FinishReason,
    Outcome,
    RequestId,
    SequenceId,
    SequenceSnapshot,
)
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

R1 = RequestId("r1")


def admitted(num_choices: int = 1) -> Admission:
    """What a predecessor had admitted."""
    made = scheduler(facts())
    add(made, request(num_choices=num_choices, max_tokens=60))
    return admissions(step(made))[0]


def successor(*snapshots: SequenceSnapshot) -> Scheduler:
    made = Scheduler()
    made.add_worker(W1, facts(), snapshots, NOW)
    made.check_integrity()
    return made


def test_who_was_to_make_room_is_adopted_beside_those_it_made_room_for() -> None:
    """The release was on its way when the predecessor died."""
    made = scheduler(facts(max_sequences=4))
    add(made, *(request(f"r{number}", max_tokens=60) for number in range(4)))
    first = admissions(step(made))
    late = replace(first[0], sequence_id=SequenceId(9), request=request("r9"), block_ids=(40, 41, 42))
    taken = Scheduler()
    taken.add_worker(W1, facts(max_sequences=2), [snapshot(each) for each in (*first[:2], late)], NOW)
    taken.check_integrity()
    add(taken, request("r10"))
    assert admissions(step(taken)) == []
    for admission in first[:2]:
        advance(taken, admission.sequence_id, 41, 7, finish=FinishReason.STOP, released=True)
    assert admitted_names(step(taken)) == ["r10"]


# A lost worker.


def test_sequences_of_a_lost_worker_go_on_elsewhere_with_their_tokens() -> None:
    made = scheduler(facts(), facts())
    add(made, request(max_tokens=60))
    step(made)
    advance(made, 1, 41, 7, 8)
    made.worker_lost(W1, NOW)
    made.worker_lost(W1, NOW)
    [admission] = admissions(step(made), W2)
    assert (admission.attempt, list(unpack_ids(admission.output)), admission.num_cached) == (1, [7, 8], 0)
    advance(made, 1, 42, 9)
    made.check_integrity()
    assert made.gauges().num_losses == 1


def test_a_request_that_loses_its_worker_too_often_fails() -> None:
    made = scheduler(config=SchedulerConfig(max_losses=2))
    add(made, request(num_choices=3))
    for _ in range(3):
        made.add_worker(W1, facts(), (), NOW)
        assert admitted_names(step(made)) == ["r1"]
        made.worker_lost(W1, NOW)
        made.recorded(RequestId("r1"), NOW)
    [ended] = step(made).ended
    assert (ended.event.outcome, ended.event.code) == (Outcome.FAILED, "request_quarantined")
    assert ended.dead is not None and len(ended.dead.losses) == 3


def test_a_worker_that_comes_back_with_a_sequence_not_placed_elsewhere_keeps_it() -> None:
    made = scheduler(facts())
    add(made, request(max_tokens=60))
    [admission] = admissions(step(made))
    made.worker_lost(W1, NOW)
    made.add_worker(W1, facts(), (snapshot(admission, 7, 8, num_computed=41),), NOW)
    assert step(made).credits == {}
    advance(made, 1, 42, 9, finish=FinishReason.STOP, released=True)
    assert len(step(made).ended) == 1


def test_a_worker_that_comes_back_with_a_sequence_placed_elsewhere_releases_it() -> None:
    made = scheduler(facts())
    add(made, request(max_tokens=60))
    [admission] = admissions(step(made))
    made.worker_lost(W1, NOW)
    made.add_worker(W2, facts(), (), NOW)
    assert admitted_names(step(made), W2) == ["r1"]
    made.add_worker(W1, facts(), (snapshot(admission, 7),), NOW)
    assert step(made).credits[W1].releases == [1]
    assert made.gauges().workers[W1].num_awaiting == 5
    report(made, released=(1,))
    assert made.gauges().workers[W1].num_free == 64


def test_a_worker_that_comes_back_with_an_attempt_that_routers_no_longer_hear_releases_it() -> None:
    made = scheduler(facts())
    add(made, request(max_tokens=60))
    [admission] = admissions(step(made))
    made.worker_lost(W1, NOW)
    made.add_worker(W2, facts(), (), NOW)
    step(made)
    made.worker_lost(W2, NOW, LossCause.HANDED_OVER)
    made.add_worker(W1, facts(), (snapshot(admission, 7),), NOW)
    decisions = step(made)
    assert decisions.credits[W1].releases == [1]
    assert [again.attempt for again in admissions(decisions)] == [2]


# The same scheduler, a new epoch.


def test_a_sequence_whose_grant_was_lost_is_placed_anew_under_a_new_id() -> None:
    made = scheduler(facts())
    add(made, request())
    step(made)
    assert made.add_worker(W1, facts(), (), NOW).adopted == ()
    [admission] = admissions(step(made))
    assert (admission.sequence_id, admission.attempt) == (2, 1)


def test_a_draining_worker_is_still_draining_in_its_next_epoch() -> None:
    made = scheduler(facts())
    made.set_accepting(W1, False)
    made.add_worker(W1, facts(), (), NOW)
    add(made, request())
    assert step(made).credits == {}


def test_a_lost_release_is_repeated() -> None:
    made = scheduler(facts())
    add(made, request(max_tokens=60))
    [admission] = admissions(step(made))
    made.cancel(R1, None, CancelReason.CLIENT, NOW)
    assert len(step(made).ended) == 1
    assert made.add_worker(W1, facts(), (snapshot(admission, 7),), NOW) == Adoption((), ())
    decisions = step(made)
    assert decisions.credits[W1].releases == [1]
    assert decisions.ended == []


def test_a_finish_that_was_not_heard_is_in_the_snapshot() -> None:
    made = scheduler(facts())
    add(made, request(max_tokens=60))
    [admission] = admissions(step(made))
    made.add_worker(W1, facts(), (snapshot(admission, 7, finish=FinishReason.STOP, released=True),), NOW)
    decisions = step(made)
    assert [ended.event.outcome for ended in decisions.ended] == [Outcome.FINISHED]
    assert decisions.credits == {}
    assert made.gauges().workers[W1].num_free == 64


def test_a_finish_heard_before_is_not_told_twice() -> None:
    made = scheduler(facts())
    add(made, request(max_tokens=60))
    [admission] = admissions(step(made))
    advance(made, 1, 40, 7, finish=FinishReason.STOP)
    assert len(step(made).ended) == 1
    made.add_worker(W1, facts(), (snapshot(admission, 7, finish=FinishReason.STOP),), NOW)
    decisions = step(made)
    assert (decisions.ended, decisions.credits) == ([], {})
    report(made, released=(1,))
    assert made.gauges().workers[W1].num_free == 64


# A successor.


def test_an_unknown_sequence_is_adopted_with_tokens_blocks_and_prefix() -> None:
    admission = admitted()
    made = Scheduler()
    assert made.add_worker(W1, facts(), (snapshot(admission, 7, 8, num_computed=41),), NOW) == Adoption((R1,), ())
    assert step(made).credits == {}
    assert dict(made.ack_subjects()) == {"r1": "ack.r1"}
    add(made, request("like", prompt=40))
    [like] = admissions(step(made))
    assert like.num_cached == 32
    assert like.sequence_id == 2
    advance(made, 1, 48, *range(7))
    assert made.num_waiting == 0
    advance(made, 1, 49, 9, finish=FinishReason.STOP, released=True)
    [ended] = step(made).ended
    assert (ended.ack_subject, ended.stream_sequence) == ("ack.r1", 1)


def test_a_short_horizon_found_in_a_snapshot_is_made_good() -> None:
    made = successor(snapshot(admitted(), *range(30), num_computed=69))
    assert [extension.sequence_id for extension in step(made).credits[W1].extensions] == [1]


def test_blocks_shared_in_a_snapshot_are_counted_once() -> None:
    one = admitted()
    two = replace(one, sequence_id=2, request=request("r2", max_tokens=60), block_ids=(*one.block_ids[:2], 10, 11))
    made = successor(snapshot(one), snapshot(two))
    gauges = made.gauges().workers[W1]
    assert (gauges.num_referenced, gauges.num_running) == (len(one.block_ids) + 2, 2)
    advance(made, 1, 40, 7, finish=FinishReason.STOP, released=True)
    assert made.gauges().workers[W1].num_referenced == 4


def test_a_sequence_that_the_predecessor_had_stopped_is_placed_anew_when_the_worker_releases_it() -> None:
    made = successor(snapshot(admitted(), 7))
    step(made)
    report(made, released=(1,))
    [admission] = admissions(step(made))
    assert (admission.attempt, list(unpack_ids(admission.output))) == (1, [7])
    assert made.gauges().workers[W1].num_awaiting == 0


def test_a_sequence_released_unfinished_is_placed_anew() -> None:
    made = successor(snapshot(admitted(), 7, released=True))
    [admission] = admissions(step(made))
    assert (admission.attempt, list(unpack_ids(admission.output))) == (1, [7])


def test_a_failure_in_a_snapshot_ends_the_request() -> None:
    made = successor(snapshot(admitted(), error="NaN", released=True))
    assert [ended.event.outcome for ended in step(made).ended] == [Outcome.FAILED]


def test_what_the_log_says_has_ended_is_forgotten_without_another_event() -> None:
    for item in (snapshot(admitted(), 7), snapshot(admitted(), 7, finish=FinishReason.STOP)):
        made = successor(item)
        assert made.forget(R1) == ("ack.r1", 1)
        decisions = step(made)
        assert decisions.ended == []
        assert (W1 in decisions.credits) == (item.finish is None)
        assert made.forget(R1) is None
        report(made, released=(1,))
        assert made.gauges().workers[W1].num_free == 64
        assert made.add_request(request(), "ack", 1, 2, NOW) is AddResult.ENDED


def test_choices_that_no_worker_holds_are_restored_from_the_log() -> None:
    admission = admitted(num_choices=4)
    made = Scheduler()
    assert made.add_worker(W1, facts(), (snapshot(admission, 7),), NOW).incomplete == ("r1",)
    assert step(made).credits == {}
    logs = {1: ChoiceLog([5, 6], 3, FinishReason.STOP), 2: ChoiceLog([8, 9], 2)}
    made.restore(R1, logs, NOW)
    two, three = admissions(step(made))
    assert (two.choice, two.attempt, list(unpack_ids(two.output)), two.num_cached) == (2, 3, [8, 9], 40)
    assert (three.choice, three.attempt, three.num_cached) == (3, 0, 39)
    for sequence_id in (1, 2, 3):
        assert step(made).ended == []
        advance(made, sequence_id, 43, 1, 2, finish=FinishReason.STOP, released=True)
    assert len(step(made).ended) == 1


def test_two_workers_hold_choices_of_one_request() -> None:
    admission = admitted(num_choices=2)
    made = successor(snapshot(admission, 7))
    other = replace(admission, choice=1, sequence_id=5)
    assert made.add_worker(W2, facts(), (snapshot(other, 7),), NOW) == Adoption((), ())
    assert made.num_waiting == 0
    made.restore(R1, {}, NOW)
    assert step(made).credits == {}
    assert made.gauges().num_running == 2


def test_of_two_stays_of_one_choice_the_later_attempt_lives() -> None:
    early, late = admitted(), replace(admitted(), attempt=4, sequence_id=9)
    for first, second, released in ((early, late, W1), (late, early, W2)):
        made = Scheduler()
        made.add_worker(W1, facts(), (snapshot(first, 7),), NOW)
        made.add_worker(W2, facts(), (snapshot(second, 7),), NOW)
        made.check_integrity()
        assert step(made).credits[released].releases == [1]
        assert made.gauges().num_running == 1


def test_an_adopted_stay_of_an_attempt_that_routers_no_longer_hear_is_replaced() -> None:
    made = successor(snapshot(admitted(), 7))
    made.restore(R1, {0: ChoiceLog([7, 8, 9], 2)}, NOW)
    decisions = step(made)
    assert decisions.credits[W1].releases == [1]
    [admission] = admissions(decisions)
    assert (admission.attempt, list(unpack_ids(admission.output))) == (3, [7, 8, 9])


def test_a_log_that_lost_its_beginning_takes_no_tokens_away() -> None:
    made = successor(snapshot(admitted(), 7, 8))
    made.restore(R1, {0: ChoiceLog([], 2)}, NOW)
    [admission] = admissions(step(made))
    assert (admission.attempt, list(unpack_ids(admission.output))) == (3, [7, 8])


def test_a_redelivered_request_starts_above_its_earlier_attempts() -> None:
    made = scheduler(facts())
    made.add_request(request(max_tokens=60), "ack", 1, 3, NOW, {0: ChoiceLog([4, 5], 700)})
    made.add_request(request("r2", max_tokens=60), "ack", 2, 3, NOW, {})
    one, two = admissions(step(made))
    assert (one.attempt, list(unpack_ids(one.output))) == (701, [4, 5])
    assert (two.attempt, two.output) == (512, b"")


def test_a_request_whose_log_is_complete_ends_without_running_again() -> None:
    made = scheduler(facts())
    made.add_request(request(), "ack", 1, 2, NOW, {0: ChoiceLog([4, 5], 0, FinishReason.STOP)})
    made.add_request(request("r2", max_tokens=2), "ack", 2, 2, NOW, {0: ChoiceLog([4, 5], 0)})
    decisions = step(made)
    assert [ended.event.outcome for ended in decisions.ended] == [Outcome.FINISHED, Outcome.FINISHED]
    assert decisions.credits == {}


def test_a_waiting_request_found_in_a_snapshot_is_adopted_there() -> None:
    admission = admitted()
    made = Scheduler()
    made.add_request(request(max_tokens=60), "ack.2", 1, 2, NOW, {0: ChoiceLog([7], 0)})
    assert made.add_worker(W1, facts(), (snapshot(admission, 7, 8),), NOW).adopted == ()
    assert step(made).credits == {}
    assert dict(made.ack_subjects()) == {"r1": "ack.2"}
