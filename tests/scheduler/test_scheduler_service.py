"""The scheduler's shell as a whole, with an in-process worker."""

import asyncio

import pytest

from headrace_scheduler import stream_watch
from headrace_scheduler.service import ADOPTED_S
from headrace_shared import codec, telemetry
from headrace_shared.bus import Delivery
from headrace_shared.fleet_messages import Telemetry
from headrace_shared.memory_bus import MemoryBus
from headrace_shared.messages import Lane, Outcome, RequestEnded, RequestId, RouterId
from headrace_shared.subjects import ALL_TELEMETRY, TOKENS, Queue, tokens_subject
from tests.integration.inprocess import MODEL, World
from tests.scheduler.shell_builders import until
from tests.scripted_engine import expected_output


async def test_counts_what_it_does() -> None:
    async with World.open() as world:
        figures: list[Telemetry] = []
        await world.bus.subscribe(ALL_TELEMETRY, lambda message: figures.append(codec.decode(message.data, Telemetry)))
        scheduler = world.scheduler()
        worker = world.worker(num_blocks=32)
        cancelled = await world.submit([1, 2, 3], max_tokens=400)
        finished = await world.submit([4, 5, 6], max_tokens=5)
        await world.ended(finished)
        world.cancel(cancelled)
        await world.ended(cancelled)
        await world.until_settled()
        metrics = scheduler.service.metrics
        outcomes = metrics.counter(telemetry.REQUESTS)
        assert outcomes.labels(MODEL, "finished")._value.get() == 1
        assert outcomes.labels(MODEL, "cancelled")._value.get() == 1
        await until(lambda: worker.session.mirror.num_sequences == 0)
        await until(lambda: figures and figures[-1].gauges.get(telemetry.NUM_FREE_BLOCKS) == 32)
        assert figures[-1].state == "ready" and figures[-1].model == MODEL
        assert b"headrace_blocks_free" in metrics.render()


async def test_a_stopped_scheduler_gives_back_what_was_never_placed() -> None:
    async with World.open() as world:
        scheduler = world.scheduler()
        world.worker(max_sequences=1, step_s=0.02)
        requests = [await world.submit([number, 5], max_tokens=300) for number in range(4)]
        await until(lambda: scheduler.core.gauges().num_requests == 4)
        await until(lambda: world.outputs[requests[0]][0])
        scheduler.service.drain()
        await until(lambda: world.is_over("scheduler-1"))
        spec = Queue(MODEL, Lane.INTERACTIVE).consumer
        offered: list[Delivery] = []
        while (delivery := await world.bus.pull(spec, 0.2)) is not None:
            offered.append(delivery)
        # The running one stays with its worker, whose next scheduler learns of it there.
        assert len(offered) == 3
        assert all(delivery.num_delivered == 2 for delivery in offered)


async def test_a_stopped_scheduler_gives_back_what_waits_for_a_worker_again() -> None:
    """Nobody else knows of it; without a word it would be offered again after the whole ack wait only."""
    async with World.open() as world:
        scheduler = world.scheduler()
        world.worker(step_s=0.02)
        request = await world.submit([4, 5], max_tokens=300)
        await until(lambda: world.outputs[request][0])
        await world.kill("worker-1")
        await until(lambda: scheduler.core.gauges().num_waiting == 1)
        scheduler.service.drain()
        await until(lambda: world.is_over("scheduler-1"))
        delivery = await world.bus.pull(Queue(MODEL, Lane.INTERACTIVE).consumer, ADOPTED_S + 1.0)
        assert delivery is not None and delivery.num_delivered == 2


async def test_a_request_whose_end_was_already_told_is_not_ended_again() -> None:
    """The predecessor died between the terminal event and the acknowledgement."""
    async with World.open() as world:
        first = world.scheduler("scheduler-1")
        world.worker(step_s=0.02, num_blocks=64)
        request_id = await world.submit([1, 2], max_tokens=800)
        await until(lambda: world.outputs[request_id][0])
        await world.kill("scheduler-1")
        del first
        event = RequestEnded(request_id=request_id, outcome=Outcome.CANCELLED)
        MemoryBus(world.broker).publish(tokens_subject(world.router, request_id), codec.encode(event))
        second = world.scheduler("scheduler-2")
        await world.until_settled()
        await until(lambda: second.core.gauges().num_requests == 0)
        assert len(await ended_events(world, request_id, world.router)) == 1


async def test_an_adopted_request_that_was_cancelled_meanwhile_ends() -> None:
    async with World.open() as world:
        world.scheduler("scheduler-1")
        world.worker(step_s=0.02, num_blocks=64)
        request_id = await world.submit([1, 2], max_tokens=800)
        await until(lambda: world.outputs[request_id][0])
        await world.kill("scheduler-1")
        world.cancel(request_id)
        await asyncio.sleep(0.05)
        world.scheduler("scheduler-2")
        await world.ended(request_id)
        assert [event.outcome for event in world.endings[request_id]] == [Outcome.CANCELLED]
        await world.until_settled()


async def test_choices_that_only_the_log_knows_are_completed() -> None:
    """One worker of two dies together with the scheduler: its choice is in no snapshot."""
    async with World.open() as world:
        world.scheduler("scheduler-1")
        workers = [world.worker(f"worker-{number}", step_s=0.01, max_sequences=2) for number in range(2)]
        request_id = await world.submit([1, 2, 3], max_tokens=300, seed=3, num_choices=4)
        await until(lambda: all(len(output) > 5 for output in world.outputs[request_id].values()))
        assert all(worker.session.mirror.num_sequences == 2 for worker in workers)
        await world.kill("scheduler-1")
        await world.kill("worker-1")
        world.worker("worker-2")
        world.scheduler("scheduler-2")
        await world.ended(request_id)
        for choice in range(4):
            assert world.outputs[request_id][choice] == expected_output([1, 2, 3], 3, choice, 300)
        assert [event.outcome for event in world.endings[request_id]] == [Outcome.FINISHED]


async def ended_events(world: World, request_id: RequestId, router: RouterId) -> list[bytes]:
    messages = await world.bus.read(TOKENS.name, tokens_subject(router, request_id), 10_000)
    return [message.data for message in messages if b"RequestEnded" in message.data]


async def test_what_somebody_has_deleted_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broker's connection was never lost. Whatever was queued is gone; what comes afterwards is served."""
    monkeypatch.setattr(stream_watch, "CHECK_S", 0.05)
    async with World.open() as world:
        world.scheduler()
        world.worker()
        await world.ended(await world.submit([1, 2], max_tokens=3))
        for name in ("REQUESTS", TOKENS.name, "KV_LEASES"):
            world.broker.streams.pop(name)
        await until(lambda: {"REQUESTS", TOKENS.name, "KV_LEASES"} <= world.broker.streams.keys())
        await world.ended(await world.submit([3, 4], max_tokens=3))
