"""Running out of blocks: who is preempted, when, and that everybody finishes as if nothing had happened."""

import pytest

from headrace_scheduler.decisions import SchedulerConfig
from headrace_scheduler.fairness import Shares
from headrace_scheduler.ledger import WorkerLedger
from headrace_scheduler.scheduler import Scheduler
from headrace_scheduler.sequence import OwnedRequest
from headrace_shared.codec import unpack_ids
from headrace_shared.messages import CancelReason, FinishReason, RequestId, SequenceId
from tests.scheduler import oracle
from tests.scheduler.builders import (
    NOW,
    W1,
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
from tests.scheduler.model_fleet import ModelFleet


def full_worker() -> Scheduler:
    """10 blocks of 16: `old` and `young` have 40 tokens and hold 5 each; none is free."""
    made = scheduler(facts(num_blocks=10, max_sequences=4))
    add(made, request("old", prompt=range(16), max_tokens=100), request("young", prompt=range(50, 82), max_tokens=90))
    assert admitted_names(step(made)) == ["old", "young"]
    advance(made, 1, 39, *range(24))
    advance(made, 2, 39, *range(8))
    step(made)
    return made


def test_a_short_horizon_preempts_nobody_while_tokens_are_left() -> None:
    made = full_worker()
    advance(made, 1, 63, *range(24))
    advance(made, 2, 60, *range(21))
    step(made)
    workers = made.gauges()
    assert (workers.num_preemptions, workers.workers[W1].num_free) == (0, 0)


def preempted() -> Scheduler:
    made = full_worker()
    advance(made, 2, 60, *range(21))
    step(made)
    advance(made, 1, 64, *range(25))
    assert step(made).credits[W1].releases == [2]
    assert (made.gauges().num_preemptions, made.num_waiting) == (1, 1)
    return made


def test_the_youngest_goes_when_an_older_one_is_within_a_block_of_stalling() -> None:
    made = preempted()
    assert [stay.num_awaiting for stay in made.gauges().workers.values()] == [5]


def test_preempted_blocks_return_only_when_released_and_go_to_the_needy_first() -> None:
    made = preempted()
    assert made.gauges().workers[W1].num_free == 0
    assert step(made).credits == {}
    report(made, released=(2,))
    credit = step(made).credits[W1]
    assert [extension.sequence_id for extension in credit.extensions] == [1]


def test_nobody_else_is_preempted_while_blocks_are_on_their_way() -> None:
    made = preempted()
    add(made, request("third", prompt=range(90, 95), max_tokens=1))
    advance(made, 1, 66, 1, 2)
    assert step(made).credits == {}
    assert made.gauges().num_preemptions == 1


def test_a_preempted_sequence_goes_on_from_its_own_tokens() -> None:
    made = preempted()
    report(made, released=(2,))
    step(made)
    advance(made, 1, 65, 1, finish=FinishReason.STOP, released=True)
    [admission] = admissions(step(made))
    assert (admission.request.request_id, admission.attempt, admission.sequence_id) == ("young", 1, 3)
    assert list(unpack_ids(admission.output)) == [*range(8), *range(21)]
    assert admission.num_cached > 0  # its own blocks, unless the needy one took them


def test_late_progress_of_a_preempted_sequence_counts_until_it_is_admitted_again() -> None:
    made = preempted()
    advance(made, 2, 62, 77, 78)
    advance(made, 1, 65, 1, finish=FinishReason.STOP)
    report(made, released=(2, 1))
    [admission] = admissions(step(made))
    assert list(unpack_ids(admission.output))[-2:] == [77, 78]
    advance(made, 2, 63, 79)
    advance(made, 3, 62, 80, finish=FinishReason.STOP, released=True)
    assert len(step(made).ended) == 1


def test_a_sequence_that_finished_before_it_heard_of_its_preemption_is_not_run_again() -> None:
    made = preempted()
    advance(made, 2, 61, 77, finish=FinishReason.STOP, released=True)
    decisions = step(made)
    assert [ended.event.request_id for ended in decisions.ended] == ["young"]
    assert made.num_waiting == 0


def test_the_youngest_stalls_rather_than_preempt_an_older_one() -> None:
    made = full_worker()
    advance(made, 2, 79, *range(40))
    step(made)
    assert made.gauges().workers[W1].num_runnable == 2
    advance(made, 2, 80, 1)
    assert step(made).credits == {}
    gauges = made.gauges()
    assert gauges.num_preemptions == 0
    assert gauges.workers[W1].num_runnable == 1
    advance(made, 1, 40, 1, finish=FinishReason.STOP, released=True)
    assert [extension.sequence_id for extension in step(made).credits[W1].extensions] == [2]


def test_no_more_are_preempted_than_the_need_asks_for() -> None:
    made = scheduler(facts(num_blocks=9, max_sequences=4))
    add(made, *(request(f"r-{i}", prompt=range(i * 50, i * 50 + 16), max_tokens=100) for i in range(3)))
    assert len(admissions(step(made))) == 3
    advance(made, 1, 32, *range(17))
    decisions = step(made)
    assert decisions.credits[W1].releases == [3]
    assert made.gauges().num_running == 2


def test_nobody_is_admitted_while_a_running_sequence_is_short() -> None:
    made = full_worker()
    advance(made, 2, 63, *range(24))
    made.cancel(RequestId("old"), None, CancelReason.CLIENT, NOW)
    add(made, request("new", prompt=range(90, 95), max_tokens=1))
    assert admitted_names(step(made)) == []
    report(made, released=(1,))
    credit = step(made).credits[W1]
    assert [extension.sequence_id for extension in credit.extensions] == [2]
    assert [admission.request.request_id for admission in credit.admissions] == ["new"]


@pytest.mark.parametrize(("num_preemptions", "reserve"), [(0, 0), (1, 2), (2, 4), (3, 4), (100, 4)])
def test_a_sequence_must_leave_more_room_each_time_it_was_preempted(num_preemptions: int, reserve: int) -> None:
    ledger = WorkerLedger(facts(num_blocks=10), horizon_blocks=2, caching=True, tables=())
    sequence = OwnedRequest(request(prompt=17, max_tokens=104), "ack", 1, 1, 0, Shares().open(request())).sequences[0]
    sequence.num_preemptions = num_preemptions
    assert ledger.headroom(sequence) == 0  # an empty worker
    other = OwnedRequest(request("other", prompt=1), "ack", 2, 2, 0, Shares().open(request())).sequences[0]
    ledger.start(SequenceId(1), other, ledger.match(other))
    assert ledger.headroom(sequence) == reserve  # it holds 4 of the 8 blocks that it may come to need


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("depth", [1, 2])
def test_four_in_a_pool_for_one_and_a_half_answer_as_if_alone(caching: bool, depth: int) -> None:
    worker = facts(num_blocks=12, max_sequences=4, tokens_per_iteration=64)
    fleet = ModelFleet(SchedulerConfig(prefix_caching=caching), [worker], depth)
    fleet.start_worker()
    seeds = [seed for seed in range(400) if oracle.length(request(max_tokens=64, seed=seed), 0) > 55][:4]
    for i, seed in enumerate(seeds):
        fleet.send(request(f"r-{i}", prompt=[i % 3, *([1, 2, 0] * 21)], max_tokens=64, seed=seed))
    fleet.settle()
    assert fleet.num_preemptions > 0
    for message in fleet.messages.values():
        view = message.choices[0]
        assert (view.shown, view.shown_finish) == oracle.answer(message.request, 0)
