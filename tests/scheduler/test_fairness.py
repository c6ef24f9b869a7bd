"""Classes that take places, tenants that share them, and nobody who starves."""

from collections import Counter

from headrace_scheduler.decisions import SchedulerConfig
from headrace_scheduler.displacement import MAX_DISPLACED
from headrace_scheduler.recording import dump_state, load_state
from headrace_scheduler.scheduler import Scheduler
from headrace_scheduler.waiting import AGING_S
from headrace_shared.messages import CancelReason, FinishReason, Lane, Request, RequestId, SequenceId
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

SMALL = facts(num_blocks=64, max_sequences=4)


def flood(made: Scheduler, tenant: str, count: int, **fields: object) -> list[str]:
    names = [f"{tenant}{number}" for number in range(count)]
    add(made, *(request(name, prompt=16, max_tokens=40, tenant=tenant, **fields) for name in names))  # type: ignore[arg-type]  # fields of a request
    return names


def serve(made: Scheduler, num_rounds: int) -> Counter[str]:
    """Each round every running sequence ends with 8 more tokens. Tokens by tenant."""
    served: Counter[str] = Counter()
    running: dict[int, Request] = {}
    for number in range(num_rounds):
        decisions = made.schedule(float(number) / 100)
        for credit in decisions.credits.values():
            for stopped in credit.releases:
                running.pop(stopped, None)
                report(made, released=[stopped])
            running |= {admission.sequence_id: admission.request for admission in credit.admissions}
        for sequence_id, wanted in list(running.items()):
            tokens = range(8)
            served[wanted.tenant] += len(tokens)
            length = len(wanted.prompt) // 4
            advance(made, sequence_id, length + 7, *tokens)
            made.cancel(wanted.request_id, None, CancelReason.STOP, 0.0)
            report(made, released=[sequence_id])
            del running[sequence_id]
    return served


def test_without_tenants_the_oldest_goes_first() -> None:
    made = scheduler(SMALL)
    names = flood(made, "", 9)
    assert admitted_names(step(made)) == names[:4]


def test_a_small_tenant_gets_its_place_from_one_that_has_more_than_its_share() -> None:
    made = scheduler(SMALL)
    flood(made, "a", 9)
    step(made)
    add(made, request("b0", prompt=16, tenant="b"))
    decisions = step(made)
    assert admitted_names(decisions) == ["b0"] and decisions.credits[W1].releases == [SequenceId(4)]
    assert admissions(decisions)[0].rank < 0, "and its prompt goes first on the worker"
    report(made, released=[4])
    add(made, request("b1", prompt=16, tenant="b"), request("b2", prompt=16, tenant="b"))
    decisions = step(made)
    assert admitted_names(decisions) == ["b1"], "half of the places, and no more"


def test_who_was_taken_off_goes_on_before_anybody_new() -> None:
    made = scheduler(SMALL)
    flood(made, "a", 9)
    step(made)
    add(made, request("b0", prompt=16, tenant="b"))
    step(made)
    report(made, released=[4])
    advance(made, 1, 16, 1, finish=FinishReason.STOP, released=True)
    (again,) = admissions(step(made))
    assert (again.request.request_id, again.attempt) == ("a3", 1)


def test_tenants_are_served_by_their_weights() -> None:
    made = scheduler(facts(num_blocks=256, max_sequences=4), config=SchedulerConfig(max_waiting=1000))
    flood(made, "a", 120)
    flood(made, "b", 220, weight=3.0)
    served = serve(made, 60)
    assert 2.5 < served["b"] / served["a"] < 3.5


def test_a_tenant_that_comes_late_gets_no_arrears() -> None:
    made = scheduler(facts(num_blocks=256, max_sequences=4), config=SchedulerConfig(max_waiting=1000))
    flood(made, "a", 250)
    serve(made, 20)
    flood(made, "b", 250)
    served = serve(made, 60)
    assert 0.25 < served["a"] / served["b"] < 1.1


def test_a_higher_class_takes_places_of_lower_ones_and_batch_requests_give_way_to_all() -> None:
    made = scheduler(SMALL)
    flood(made, "a", 2, lane=Lane.BATCH)
    flood(made, "b", 2, priority=-1)
    step(made)
    add(made, request("n0", prompt=16), request("n1", prompt=16), request("n2", prompt=16))
    decisions = step(made)
    assert admitted_names(decisions) == ["n0", "n1", "n2"]
    assert sorted(decisions.credits[W1].releases) == [2, 3, 4], "the batch first, then the youngest of the low class"
    add(made, request("low", prompt=16, priority=-1))
    assert admitted_names(step(made)) == []


def test_room_is_kept_for_whom_it_was_made() -> None:
    made = scheduler(facts(num_blocks=12, max_sequences=4))
    add(made, request("a", prompt=[1] * 80, max_tokens=100, tenant="a", priority=-1))
    step(made)
    add(made, request("big", prompt=[2] * 100, max_tokens=20, priority=1))
    decisions = step(made)
    assert decisions.credits[W1].releases == [SequenceId(1)] and not admissions(decisions), "they come back later"
    add(made, request("c", prompt=[3] * 16, max_tokens=4, priority=-1))
    assert admitted_names(step(made)) == []
    report(made, released=[1])
    assert admitted_names(step(made))[0] == "big"


def test_nobody_is_taken_off_for_ever() -> None:
    made = scheduler(facts(num_blocks=64, max_sequences=1))
    add(made, request("low", prompt=16, max_tokens=40, priority=-1))
    (running,) = admissions(step(made))
    for number in range(MAX_DISPLACED):
        add(made, request(f"high-{number}", prompt=16, max_tokens=4, priority=1))
        (high,) = admissions(step(made))
        report(made, released=[running.sequence_id])
        advance(made, high.sequence_id, 19, 1, 2, 3, 4, finish=FinishReason.LENGTH, released=True)
        (running,) = admissions(step(made))
        assert running.request.request_id == "low"
    add(made, request("last", prompt=16, max_tokens=4, priority=1))
    decisions = step(made)
    assert not decisions.credits or not decisions.credits[W1].releases


def test_long_waits_raise_a_class() -> None:
    made = scheduler(facts(num_blocks=64, max_sequences=1))
    add(made, request("first", prompt=16, max_tokens=40, priority=1))
    (running,) = admissions(step(made))
    add(made, request("low", prompt=16, max_tokens=4, priority=-1))
    for number in range(2):
        made.schedule(AGING_S * (number + 1))
    add(made, request("high", prompt=16, max_tokens=4, priority=1))
    advance(made, running.sequence_id, 16, 1, finish=FinishReason.STOP, released=True)
    decisions = made.schedule(2 * AGING_S + 1)
    assert admitted_names(decisions)[0] == "low", "as old as it is, and of the highest class by now"
    made.check_integrity()


def test_a_class_gained_by_waiting_takes_nobody_off() -> None:
    made = scheduler(facts(num_blocks=64, max_sequences=1))
    add(made, request("first", prompt=16, max_tokens=40))
    step(made)
    add(made, request("second", prompt=16, max_tokens=40))
    for number in range(1, 5):
        assert not made.schedule(AGING_S * number).credits
    made.check_integrity()


def test_counters_survive_in_a_recording() -> None:
    made = scheduler(SMALL)
    flood(made, "a", 9)
    step(made)
    add(made, request("b0", prompt=16, tenant="b"))
    again = load_state(dump_state(made))
    again.check_integrity()
    assert again.schedule(NOW) == made.schedule(NOW)
    assert again.request(RequestId("b0")) is not None
