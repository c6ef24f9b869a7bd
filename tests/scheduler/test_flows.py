"""Tenants' queues, and whose turn it is to take from them."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from msgspec.structs import replace

from headrace_scheduler import stealing
from headrace_scheduler.flows import Flows
from headrace_scheduler.queue_owners import owners
from headrace_shared import codec
from headrace_shared.api_keys import ApiKey
from headrace_shared.messages import FinishReason, Lane, Progress, RequestId, SequenceProgress, WorkerId
from headrace_shared.subjects import KEYS, REQUESTS, Queue, former_consumer, num_partitions
from tests.queues import whole_lane
from tests.scheduler.intake_bench import FACTS, Bench
from tests.scheduler.shell_builders import MODEL, request, until


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    await bench.start()
    yield bench
    for task in bench.tasks:
        task.cancel()
    await asyncio.gather(*bench.tasks, return_exceptions=True)


def key(flow: int) -> bytes:
    record = ApiKey(key_id=f"{flow:012x}", secret_hash=b"", name="n", tenant=f"t{flow}", flow=flow, created=0)
    return codec.encode(record)


async def put(bench: Bench, number: int, flow: int, partition: int = 0) -> None:
    wanted = replace(request(number), tenant=f"t{flow}" if flow else "")
    subject = Queue(MODEL, Lane.INTERACTIVE, flow, partition).subject
    await bench.bus.enqueue(subject, codec.encode(wanted), message_id=str(number))


async def until_owned(bench: Bench, request_id: RequestId) -> None:
    await until(lambda: request_id in bench.owned())


async def test_a_new_tenants_queues_are_served_at_once(bench: Bench) -> None:
    await bench.bus.ensure_consumer(whole_lane(MODEL, Lane.INTERACTIVE))  # as an older version left it
    flows = Flows(bench.bus, MODEL, bench.intake.serve)
    await flows.open()
    depths = await bench.bus.queue_depths(REQUESTS)
    assert former_consumer(MODEL, Lane.INTERACTIVE) not in depths
    bench.tasks.append(asyncio.create_task(flows.run()))
    bench.run_intake()
    bench.core.add_worker(WorkerId("w"), FACTS, (), 0.0)
    await put(bench, 1, flow=7, partition=3)
    await bench.bus.put(KEYS.name, f"{7:012x}", key(7))
    await until(lambda: len(bench.owned()) == 1)
    # A key that is revoked leaves what was accepted.
    await bench.bus.remove(KEYS.name, f"{7:012x}")
    await put(bench, 2, flow=7, partition=1)
    await until(lambda: len(bench.owned()) == 2)


async def test_a_flood_hides_nobody(bench: Bench) -> None:
    """The window is full of one tenant's requests; the others' first ones are in it all the same, and no more."""
    for flow in (1, 2):
        bench.intake.serve(flow)
    bench.core.add_worker(WorkerId("w"), FACTS, (), 0.0)
    for number in range(200):
        await put(bench, 1000 + number, flow=1, partition=number % 4)
    bench.run_intake()
    await until(lambda: bench.core.room() == 0)
    for number in range(3):
        await put(bench, 1 + number, flow=2)
    await until(lambda: request(1).request_id in bench.owned())
    await asyncio.sleep(0.2)
    assert request(2).request_id not in bench.owned()
    assert len(bench.owned()) < 30
    bench.core.schedule(0.0)
    bench.intake.on_pass()
    await until(lambda: request(2).request_id in bench.owned())


async def test_partitions_do_not_change_the_order_of_arrival(bench: Bench) -> None:
    """However many wait in one of them, none gets a turn before those who came earlier."""
    worker, num_requests = WorkerId("w"), 40
    bench.core.add_worker(worker, FACTS._replace(max_sequences=1), (), 0.0)
    for number in range(num_requests):
        await put(bench, number, flow=0, partition=2 if number < 24 else number % 8)
    bench.run_intake()
    for number in range(num_requests):
        following = request(number).request_id
        await until_owned(bench, following)
        (admission,) = bench.core.schedule(0.0).credits[worker].admissions
        assert admission.request.request_id == following
        sequence = SequenceProgress(admission.sequence_id, 5, (7,), FinishReason.STOP)
        report = Progress(
            worker=worker,
            epoch=1,
            number=number + 1,
            grant_seen=0,
            sequences=(sequence,),
            released=(admission.sequence_id,),
        )
        bench.core.apply_progress(worker, report, 0.0)
        bench.intake.on_pass()
    assert bench.core.num_waiting == 0


async def test_an_idle_scheduler_takes_what_a_busy_one_has_no_room_for(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stealing, "STEAL_S", 0.01)
    names = ["a", "b"]
    bench.intake._own_id = "a"
    bench.intake._peers = lambda: ["b"]
    bench.core.add_worker(WorkerId("w"), FACTS, (), 0.0)
    owned = owners(num_partitions(Lane.INTERACTIVE, 0) + 1, f"{MODEL}/0", names)
    bench.run_intake()
    await put(bench, 1, flow=0, partition=owned.index("b"))
    await until(lambda: len(bench.owned()) == 1)
    # Not while it has work of its own waiting.
    await put(bench, 2, flow=0, partition=owned.index("b"))
    await asyncio.sleep(0.3)
    assert len(bench.owned()) == 1 and bench.core.num_waiting == 1
    bench.core.schedule(0.0)
    await until(lambda: len(bench.owned()) == 2)
