"""Admission, credit and the ends of requests, on one worker of blocks of 16 unless said otherwise."""

import pytest

from headrace_scheduler.decisions import AddResult
from headrace_scheduler.scheduler import Scheduler
from headrace_scheduler.waiting import LOOKAHEAD, MAX_BYPASSED
from headrace_shared.codec import unpack_ids
from headrace_shared.messages import (
    GRAMMAR_FAILED,
    BlockId,
    CancelReason,
    Extension,
    FinishReason,
    Outcome,
    RequestId,
    SequenceId,
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
    step,
)

R1 = RequestId("r1")


def finish(made: Scheduler, sequence_id: int, num_computed: int, *tokens: int) -> None:
    advance(made, sequence_id, num_computed, *tokens, finish=FinishReason.STOP, released=True)


def outcomes(made: Scheduler) -> dict[str, Outcome]:
    return {ended.event.request_id: ended.event.outcome for ended in step(made).ended}


def num_free(made: Scheduler) -> int:
    return made.gauges().workers[W1].num_free


# Admission and credit.


def test_an_admission_grants_the_prompt_and_the_horizon() -> None:
    made = scheduler(facts())
    add(made, request(prompt=40, max_tokens=100))
    [admission] = admissions(step(made))
    assert (admission.choice, admission.attempt, admission.num_cached, admission.copies) == (0, 0, 0, ())
    assert len(admission.block_ids) == 5  # 40 + 32 positions
    assert (admission.ack_subject, admission.stream_sequence) == ("ack.r1", 1)


def test_nothing_is_granted_beyond_what_max_tokens_can_use() -> None:
    made = scheduler(facts())
    add(made, request(prompt=40, max_tokens=9))
    [admission] = admissions(step(made))
    assert len(admission.block_ids) == 3  # 48 positions: the 49th token needs none
    advance(made, 1, 47, *range(8))
    assert step(made).credits == {}


def test_a_running_sequence_is_kept_a_horizon_ahead() -> None:
    made = scheduler(facts())
    add(made, request(prompt=40, max_tokens=100))
    [admission] = admissions(step(made))
    advance(made, 1, 47, *range(8))
    assert step(made).credits == {}  # 48 tokens, 80 positions
    advance(made, 1, 48, 9)
    credit = step(made).credits[W1]
    assert credit.extensions == [Extension(SequenceId(1), (BlockId(5),))]
    assert 5 not in admission.block_ids
    assert step(made).credits == {}


def test_a_long_silence_is_made_good_by_one_extension() -> None:
    made = scheduler(facts())
    add(made, request(prompt=40, max_tokens=100))
    step(made)
    advance(made, 1, 79, *range(40))
    [extension] = step(made).credits[W1].extensions
    assert len(extension.block_ids) == 2  # 80 tokens + 32


def test_no_more_run_than_the_worker_takes() -> None:
    made = scheduler(facts(max_sequences=2))
    add(made, request("a"), request("b"), request("c"))
    assert admitted_names(step(made)) == ["a", "b"]
    advance(made, 1, 40, 1, finish=FinishReason.STOP)
    assert admitted_names(step(made)) == ["c"]


def test_without_a_worker_requests_wait() -> None:
    made = Scheduler()
    add(made, request())
    assert step(made).credits == {}
    made.add_worker(W1, facts(), (), NOW)
    assert admitted_names(step(made)) == ["r1"]


def test_the_longest_wait_is_told() -> None:
    made = Scheduler()
    assert made.oldest_wait_s(5.0) == 0.0
    made.add_request(request("a"), "ack.a", 1, 1, 10.0)
    made.add_request(request("b"), "ack.b", 2, 1, 12.0)
    assert made.oldest_wait_s(15.0) == 5.0
    made.cancel(RequestId("a"), None, CancelReason.CLIENT, 15.0)
    assert made.oldest_wait_s(15.0) == 3.0
    made.add_worker(W1, facts(), (), 16.0)
    made.schedule(16.0)
    assert made.oldest_wait_s(17.0) == 0.0
    made.worker_lost(W1, 20.0)  # it waits again: only this wait counts
    assert made.oldest_wait_s(21.0) == 1.0


def test_a_draining_worker_gets_nobody_new_but_its_sequences_go_on() -> None:
    made = scheduler(facts())
    add(made, request("a", max_tokens=100))
    step(made)
    made.set_accepting(W1, False)
    add(made, request("b"))
    advance(made, 1, 40, *range(20))
    credit = step(made).credits[W1]
    assert credit.extensions and not credit.admissions
    made.set_accepting(W1, True)
    assert admitted_names(step(made)) == ["b"]


def test_the_oldest_message_of_the_queue_is_admitted_first() -> None:
    made = Scheduler()
    for name, stream_sequence in (("late", 9), ("early", 3)):
        made.add_request(request(name), "ack", stream_sequence, 1, NOW)
    made.add_worker(W1, facts(), (), NOW)
    assert admitted_names(step(made)) == ["early", "late"]


# What cannot fit, what fits, and who waits for whom.


@pytest.mark.parametrize("context", [128, 4096])
@pytest.mark.parametrize("num_prompt", [100, 111, 112, 120, 121, 122, 127, 128, 129, 500])
def test_every_length_completes_or_is_refused_at_once_and_the_short_one_behind_completes(
    num_prompt: int, context: int
) -> None:
    made = scheduler(facts(num_blocks=8, context=context))
    fits = num_prompt + 8 <= context and num_prompt + 8 - 1 <= 8 * 16
    add(made, request("long", prompt=num_prompt, max_tokens=8), request("short", prompt=5, max_tokens=8))
    decisions = step(made)
    if not fits:
        [ended] = decisions.ended
        assert (ended.event.request_id, ended.event.outcome) == ("long", Outcome.FAILED)
        assert ended.event.code == "context_length_exceeded"
        assert admitted_names(decisions) == ["short"]
        return
    assert admitted_names(decisions)[0] == "long"
    for i in range(8):
        advance(made, 1, num_prompt + i, i, finish=FinishReason.LENGTH if i == 7 else None, released=i == 7)
        decisions = step(made)
    assert [ended.event.request_id for ended in decisions.ended] == ["long"]
    running = made.gauges().workers[W1]
    assert (running.num_running, made.num_waiting) == (1, 0)


@pytest.mark.parametrize("running", [False, True])
def test_cancelling_the_long_one_leaves_room_for_the_next(running: bool) -> None:
    made = scheduler(facts(num_blocks=8))
    add(made, request("long", prompt=112, max_tokens=8), request("next", prompt=112, max_tokens=8))
    if running:
        step(made)
    made.cancel(RequestId("long"), None, CancelReason.CLIENT, NOW)
    decisions = step(made)
    assert [ended.event.outcome for ended in decisions.ended] == [Outcome.CANCELLED]
    if running:
        assert decisions.credits[W1].releases == [1]
        report(made, released=(1,))
        decisions = step(made)
    assert admitted_names(decisions) == ["next"]


def test_a_big_one_that_does_not_fit_now_is_passed_only_so_often() -> None:
    made = scheduler(facts(num_blocks=8))
    add(made, request("first", prompt=16, max_tokens=1))
    step(made)
    add(made, request("big", prompt=100, max_tokens=28))
    last = 1
    for i in range(MAX_BYPASSED):
        add(made, request(f"small-{i}", prompt=16, max_tokens=1))
        assert admitted_names(step(made)) == [f"small-{i}"]
        finish(made, last, 16, 1)
        last += 1
    add(made, request("too-late", prompt=16, max_tokens=1))
    assert admitted_names(step(made)) == []
    finish(made, last, 16, 1)
    assert admitted_names(step(made)) == ["big"]


def test_a_worker_reserved_for_a_big_one_does_not_stop_the_others() -> None:
    made = scheduler(facts(num_blocks=8), facts(num_blocks=4))
    add(made, request("first", prompt=100, max_tokens=20))
    assert admitted_names(step(made), W1) == ["first"]
    add(made, request("big", prompt=100, max_tokens=28))
    for i in range(MAX_BYPASSED + 3):
        add(made, request(f"small-{i}", prompt=40, max_tokens=1))
        [admission] = admissions(step(made), W2)
        advance(made, admission.sequence_id, 40, 1, finish=FinishReason.STOP, worker=W2, released=True)
    assert made.num_waiting == 1
    finish(made, 1, 100, 1)
    assert admitted_names(step(made), W1) == ["big"]


def test_only_so_many_are_looked_at_behind_one_that_does_not_fit() -> None:
    made = scheduler(facts(num_blocks=8))
    add(made, request("first", prompt=100, max_tokens=1))
    step(made)
    add(made, *(request(f"big-{i}", prompt=100, max_tokens=1) for i in range(LOOKAHEAD + 1)))
    add(made, request("small", prompt=5, max_tokens=1))
    assert admitted_names(step(made)) == []
    made.cancel(RequestId("big-0"), None, CancelReason.CLIENT, NOW)
    assert admitted_names(step(made)) == ["small"]


# Ends of requests.


def test_a_finished_request_ends_once_and_its_blocks_return_when_released() -> None:
    made = scheduler(facts())
    add(made, request())
    step(made)
    advance(made, 1, 40, 1, finish=FinishReason.STOP)
    [ended] = step(made).ended
    assert (ended.event.outcome, ended.router, ended.ack_subject) == (Outcome.FINISHED, "router-1", "ack.r1")
    assert made.gauges().workers[W1].num_awaiting == 4
    report(made, released=(1,))
    assert num_free(made) == 64
    advance(made, 1, 41, 2, finish=FinishReason.STOP)
    assert step(made).ended == []


@pytest.mark.parametrize(
    ("reason", "outcome"),
    [
        (CancelReason.CLIENT, Outcome.CANCELLED),
        (CancelReason.STOP, Outcome.FINISHED),
        (CancelReason.DEADLINE, Outcome.EXPIRED),
    ],
)
def test_the_reason_of_a_cancel_decides_the_outcome(reason: CancelReason, outcome: Outcome) -> None:
    made = scheduler(facts())
    add(made, request())
    step(made)
    made.cancel(R1, None, reason, NOW)
    made.cancel(R1, None, CancelReason.CLIENT, NOW)
    decisions = step(made)
    assert decisions.credits[W1].releases == [1]
    assert [ended.event.outcome for ended in decisions.ended] == [outcome]


def test_cancelling_what_is_unknown_changes_nothing() -> None:
    made = scheduler(facts())
    made.cancel(R1, None, CancelReason.CLIENT, NOW)
    add(made, request())
    made.cancel(R1, 7, CancelReason.CLIENT, NOW)
    assert admitted_names(step(made)) == ["r1"]


def test_a_sequence_that_fails_alone_ends_its_request_and_no_other() -> None:
    made = scheduler(facts())
    add(made, request("a", num_choices=2), request("b"))
    step(made)
    advance(made, 1, 40, 1)
    step(made)
    advance(made, 3, 40, error="NaN in /secret/path")
    decisions = step(made)
    [ended] = decisions.ended
    assert (ended.event.request_id, ended.event.outcome, ended.event.code) == ("a", Outcome.FAILED, "internal_error")
    assert "secret" not in ended.event.message
    assert ended.detail == "NaN in /secret/path"
    assert made.gauges().num_running == 1


def test_whose_grammar_failed_is_told_so() -> None:
    made = scheduler(facts())
    add(made, request("a"))
    step(made)
    advance(made, 1, 40, 1)
    advance(made, 1, 40, error=f"{GRAMMAR_FAILED}too many states")
    [ended] = step(made).ended
    assert (ended.event.outcome, ended.event.code) == (Outcome.FAILED, "grammar_too_complex")
    assert "form" in ended.event.message and "states" not in ended.event.message


def test_a_redelivered_message_replaces_the_ack_subject_only() -> None:
    made = scheduler(facts())
    add(made, request())
    step(made)
    assert made.add_request(request(), "ack.2", 1, 2, NOW) is AddResult.KNOWN
    assert dict(made.ack_subjects()) == {"r1": "ack.2"}
    finish(made, 1, 40, 1)
    [ended] = step(made).ended
    assert ended.ack_subject == "ack.2"
    assert made.add_request(request(), "ack.3", 1, 3, NOW) is AddResult.ENDED
    assert step(made) == ({}, [], [])


def test_a_message_redelivered_between_the_end_and_its_event_is_acknowledged_by_the_event() -> None:
    made = scheduler(facts())
    add(made, request())
    made.cancel(R1, None, CancelReason.CLIENT, NOW)
    assert made.add_request(request(), "ack.2", 1, 2, NOW) is AddResult.KNOWN
    [ended] = step(made).ended
    assert ended.ack_subject == "ack.2"


# Every way to end gives everything back.


def test_every_way_to_end_gives_all_blocks_back() -> None:
    made = scheduler(facts(num_blocks=16, max_sequences=4))
    for i in range(500):
        name, stage = RequestId(f"r-{i}"), i % 5
        add(made, request(name, prompt=50, max_tokens=1 if stage == 0 else 60, seed=i))
        if stage == 1:
            made.cancel(name, None, CancelReason.CLIENT, NOW)
            assert list(outcomes(made).values()) == [Outcome.CANCELLED]
            continue
        [admission] = admissions(step(made))
        sequence_id = admission.sequence_id
        if stage == 0:
            finish(made, sequence_id, 50, 1)
        elif stage == 2:
            advance(made, sequence_id, 48)
        elif stage == 3:
            advance(made, sequence_id, 50, 1)
        else:
            advance(made, sequence_id, 69, *range(20))
        if stage:
            made.cancel(name, None, CancelReason.CLIENT, NOW)
            assert len(outcomes(made)) == 1
            report(made, released=(sequence_id,))
        else:
            assert len(outcomes(made)) == 1
        gauges = made.gauges()
        assert (gauges.num_requests, gauges.num_waiting, gauges.num_running) == (0, 0, 0)
        assert gauges.workers[W1].num_free == 16
    add(made, request("whole pool", prompt=200, max_tokens=56))
    assert admitted_names(step(made)) == ["whole pool"]


def test_tokens_are_kept_in_order_over_coalesced_progress() -> None:
    made = scheduler(facts())
    add(made, request(max_tokens=100))
    step(made)
    advance(made, 1, 40, 1, 2, 3)
    advance(made, 1, 43, 4)
    made.worker_lost(W1, NOW)
    made.add_worker(W1, facts(), (), NOW)
    [admission] = admissions(step(made))
    assert list(unpack_ids(admission.output)) == [1, 2, 3, 4]
