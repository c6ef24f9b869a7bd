"""Adapters and embeddings in the core: who may run a request, and which cached blocks it may have."""

import msgspec
import pytest

from headrace_scheduler.admission import ADAPTER_PATIENCE_S
from headrace_scheduler.recording import Chunk, Recorder
from headrace_scheduler.replay import chunks, replay
from headrace_scheduler.scheduler import Scheduler
from headrace_shared.codec import encode
from headrace_shared.fleet_messages import LoadedAdapter, WorkerState
from headrace_shared.messages import FinishReason, Outcome, SchedulerId, SequenceSnapshot
from headrace_shared.record_messages import FlightPart
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
    step,
)
from tests.scheduler.shell_builders import until
from tests.scheduler.site import World

POET = "digest of poet"
CLERK = "digest of clerk"


def test_only_a_worker_that_has_the_adapter_gets_the_request() -> None:
    made = scheduler(facts(), facts())
    made.set_adapters(W2, (POET,))
    add(made, *(request(f"r{number}", adapter="poet") for number in range(4)))
    decisions = step(made)
    assert admitted_names(decisions, W1) == []
    assert admitted_names(decisions, W2) == ["r0", "r1", "r2", "r3"]
    assert admissions(decisions, W2)[0].request.adapter_digest == POET


def test_who_waits_for_an_adapter_holds_up_nobody() -> None:
    made = scheduler(facts())
    add(made, *(request(f"poet{number}", adapter="poet", priority=1) for number in range(20)))
    add(made, request("plain"), request("clerk", adapter="clerk"))
    made.set_adapters(W1, (CLERK,))
    assert admitted_names(step(made)) == ["plain", "clerk"]
    made.set_adapters(W1, (CLERK, POET))
    assert len(admitted_names(step(made))) >= 10


def test_who_waits_too_long_for_an_adapter_is_given_up_and_others_are_not() -> None:
    made = scheduler(facts(max_sequences=1))
    add(made, request("plain"), request("poet", adapter="poet"), request("behind"))
    step(made)
    assert not made.is_overdue(ADAPTER_PATIENCE_S - 1)
    assert made.schedule(ADAPTER_PATIENCE_S - 1).ended == []
    assert made.is_overdue(ADAPTER_PATIENCE_S)
    [ended] = made.schedule(ADAPTER_PATIENCE_S).ended
    assert (ended.event.request_id, ended.event.outcome) == ("poet", Outcome.FAILED)
    assert ended.event.code == "model_not_found" and "poet" in ended.event.message
    assert not made.is_overdue(10 * ADAPTER_PATIENCE_S)
    made.check_integrity()


def test_patience_counts_from_when_the_adapter_went_and_not_from_when_the_request_came() -> None:
    made = scheduler(facts(max_sequences=1), facts())
    made.set_adapters(W1, (POET,))
    add(made, request("first", adapter="poet"), request("second", adapter="poet"))
    assert admitted_names(step(made), W1) == ["first"]
    assert made.schedule(100.0).ended == []
    made.worker_lost(W1, 100.0)
    assert made.schedule(100.0).ended == [], "the worker may be back in a moment"
    assert not made.is_overdue(99.0 + ADAPTER_PATIENCE_S)
    made.add_worker(W1, facts(), (), 105.0)
    made.set_adapters(W1, (POET,))
    assert sorted(admitted_names(made.schedule(105.0), W1)) == ["first", "second"]
    # What was missing once counts anew when it is missing again.
    made.worker_lost(W1, 200.0)
    assert made.schedule(200.0).ended == [] and made.schedule(199.0 + ADAPTER_PATIENCE_S).ended == []
    assert made.is_overdue(200.0 + ADAPTER_PATIENCE_S)
    ended = made.schedule(200.0 + ADAPTER_PATIENCE_S).ended
    assert {item.event.code for item in ended} == {"model_not_found"} and len(ended) == 2
    made.check_integrity()


def test_what_runs_goes_on_when_its_adapter_is_unloaded() -> None:
    made = scheduler(facts())
    made.set_adapters(W1, (POET,))
    add(made, request("r1", adapter="poet", max_tokens=2))
    [admission] = admissions(step(made))
    made.set_adapters(W1, ())
    assert step(made).credits == {}
    advance(made, admission.sequence_id, 40, 1)
    advance(made, admission.sequence_id, 41, 2, finish=FinishReason.LENGTH, released=True)
    assert [ended.event.outcome for ended in step(made).ended] == [Outcome.FINISHED]


def test_a_sequence_that_lost_its_worker_goes_where_its_adapter_is() -> None:
    made = scheduler(facts(), facts(), facts())
    made.set_adapters(W1, (POET,))
    add(made, request("r1", adapter="poet"))
    [admission] = admissions(step(made))
    advance(made, admission.sequence_id, 40, 7)
    made.set_adapters(W2, (POET,))
    made.worker_lost(W1, NOW)
    [again] = admissions(step(made), W2)
    assert (again.request.adapter_digest, again.attempt) == (POET, 1)


def test_adapters_stay_known_when_a_worker_is_adopted_again() -> None:
    made = scheduler(facts())
    made.set_adapters(W1, (POET,))
    nothing: tuple[SequenceSnapshot, ...] = ()
    made.add_worker(W1, facts(), nothing, NOW)
    add(made, request("r1", adapter="poet"))
    assert admitted_names(step(made)) == ["r1"]


def run_once(made: Scheduler, name: str, adapter: str = "", *, embeds: bool = False) -> int:
    """Tokens that came from the cache."""
    add(made, request(name, prompt=40, max_tokens=1, adapter=adapter, embeds=embeds))
    [admission] = admissions(step(made))
    advance(made, admission.sequence_id, 40, 1, finish=FinishReason.STOP, released=True)
    step(made)
    return admission.num_cached


@pytest.mark.parametrize("first", ["", "poet", "clerk"])
@pytest.mark.parametrize("second", ["", "poet", "clerk"])
def test_what_was_computed_under_one_adapter_is_read_under_no_other(first: str, second: str) -> None:
    made = scheduler(facts())
    made.set_adapters(W1, (POET, CLERK))
    assert run_once(made, "r1", first) == 0
    assert run_once(made, "r2", second) == (32 if first == second else 0)


def test_another_content_under_the_same_name_shares_nothing() -> None:
    made = scheduler(facts())
    made.set_adapters(W1, (POET, "later"))
    run_once(made, "r1", "poet")
    changed = msgspec.structs.replace(request("r2", adapter="poet"), adapter_digest="later")
    add(made, changed)
    assert admissions(step(made))[0].num_cached == 0


def test_embeddings_read_no_cached_blocks_and_leave_theirs() -> None:
    made = scheduler(facts())
    assert run_once(made, "r1") == 0
    assert run_once(made, "r2", embeds=True) == 0
    assert run_once(made, "r3") == 32
    other = scheduler(facts())
    assert run_once(other, "r1", embeds=True) == 0
    assert run_once(other, "r2") == 32


def test_a_recording_tells_the_same_again() -> None:
    made = scheduler(facts())
    recorder = Recorder("s")
    recorder.attach(made, 0.0, 0.0)
    made.set_adapters(W1, (POET,))
    add(made, request("r1", adapter="poet"), request("r2", adapter="clerk"))
    step(made)
    made.schedule(ADAPTER_PATIENCE_S)
    data = recorder.take(1.0, 1.0)
    assert data is not None
    part = FlightPart(scheduler=SchedulerId("s"), chunk=1, part=0, num_parts=1, data=data)
    assert msgspec.msgpack.decode(data, type=Chunk).keyframe
    passes = [moment for moment in replay(chunks([encode(part)])) if moment.decisions is not None]
    assert len(passes) == 2 and all(moment.is_same for moment in passes)


async def test_what_a_worker_says_of_adapters_reaches_the_core(world: World) -> None:
    site = await world.site()
    worker = await world.worker()
    await until(lambda: site.known == {worker.id})
    assert site.core.adapters_of(worker.id) == ()
    loaded = LoadedAdapter("poet", POET)
    worker.hello(
        WorkerState.READY, loaded, LoadedAdapter("bad", "", "too large"), LoadedAdapter("full", "d", "no room")
    )
    await until(lambda: site.core.adapters_of(worker.id) == (POET,))
    worker.hello(WorkerState.READY)
    await until(lambda: site.core.adapters_of(worker.id) == ())
    worker.hello(WorkerState.READY, loaded)
    worker.progress(number=9)  # one is missing: it is adopted again
    await until(lambda: worker.epoch == 2)
    await until(lambda: site.core.adapters_of(worker.id) == (POET,))
