"""Scheduler and worker processes on a real broker, with the scripted engine in place of a model."""

import asyncio
import random
import signal
import time

import pytest

from headrace_shared import codec
from headrace_shared.broker import NatsServer
from headrace_shared.messages import CancelReason, FinishReason, Lane, Outcome
from headrace_shared.subjects import request_subject
from tests.integration.deployment import MODEL, Client, Deployment, Heard, ended, until, until_empty
from tests.scripted_engine import ECHO, ERROR_AT, EXIT_AT, HANG_AT, expected_output

pytestmark = pytest.mark.nats

PROMPT = list(range(100, 140))


def assert_complete(heard: Heard, num_tokens: int) -> None:
    """One ending, and every token once and in order."""
    prompt = codec.unpack_ids(heard.request.prompt).tolist()
    for choice in range(heard.request.num_choices):
        assert heard.outputs[choice] == expected_output(prompt, heard.request.sampling.seed, choice, num_tokens)
        assert heard.finishes[choice] is FinishReason.LENGTH
    assert [event.outcome for event in heard.endings] == [Outcome.FINISHED]


async def blocks_return(client: Client, *workers: str) -> None:
    """Every worker holds nothing, by its own account and the scheduler's."""
    for worker in workers:
        await until(
            lambda worker=worker: client.gauge(worker, "num_free_blocks") == client.gauge(worker, "num_blocks"),  # type: ignore[misc]  # a default binds it
            what=f"{worker}: {client.telemetry.get(worker)}",
        )


async def test_requests_end_exactly_once(deployment: Deployment, client: Client) -> None:
    await deployment.scheduler()
    await deployment.worker()
    requests = [await client.submit(PROMPT, max_tokens=40, seed=seed) for seed in range(20)]
    requests.append(await client.submit(PROMPT, max_tokens=40, seed=99, num_choices=3))
    await ended(*requests)
    await until_empty(client)
    for heard in requests:
        assert_complete(heard, 40)
        assert heard.num_repeated == 0 and heard.num_gaps == 0
        assert (await client.log_of(heard))[-1] == heard.endings[0]
    await blocks_return(client, "worker-1")


async def test_a_killed_scheduler_is_replaced_and_no_sequence_starts_again(
    deployment: Deployment, client: Client
) -> None:
    await deployment.scheduler("scheduler-1")
    await deployment.worker(step_s=0.02)
    requests = [await client.submit(PROMPT, max_tokens=150, seed=seed) for seed in range(8)]
    requests.append(await client.submit(PROMPT, max_tokens=150, seed=8, num_choices=2))
    await until(lambda: all(len(heard.outputs.get(0, [])) > 10 for heard in requests), what="tokens")
    await deployment.kill("scheduler-1")
    await deployment.scheduler("scheduler-2")
    await ended(*requests)
    await until_empty(client)
    for heard in requests:
        assert_complete(heard, 150)
        assert heard.num_repeated == 0
        assert all(attempts == {0} for attempts in heard.attempts.values()), heard.attempts
    await blocks_return(client, "worker-1")


async def test_a_second_scheduler_takes_over_a_killed_ones_workers(deployment: Deployment, client: Client) -> None:
    await deployment.scheduler("scheduler-1")
    await deployment.worker(step_s=0.02)
    await until(lambda: client.gauge("scheduler-1", "num_workers") == 1.0, what="adoption")
    await deployment.scheduler("scheduler-2")
    requests = [await client.submit(PROMPT, max_tokens=200, seed=seed) for seed in range(4)]
    await until(lambda: all(len(heard.outputs.get(0, [])) > 10 for heard in requests), what="tokens")
    await deployment.kill("scheduler-1")
    await ended(*requests)
    await until_empty(client)
    for heard in requests:
        assert_complete(heard, 200)
        assert heard.num_repeated == 0 and heard.attempts == {0: {0}}


async def test_a_stopped_scheduler_hands_over_at_once(deployment: Deployment, client: Client) -> None:
    await deployment.scheduler("scheduler-1")
    await deployment.worker(step_s=0.02, max_sequences=4)
    await until(lambda: client.gauge("scheduler-1", "num_workers") == 1.0, what="adoption")
    await deployment.scheduler("scheduler-2")
    requests = [await client.submit(PROMPT, max_tokens=60, seed=seed) for seed in range(16)]
    await until(lambda: all(len(heard.outputs.get(0, [])) > 5 for heard in requests[:4]), what="tokens")
    started_at = time.monotonic()
    assert await deployment.stop("scheduler-1") == 0
    assert time.monotonic() - started_at < 5.0
    await ended(*requests, timeout_s=12.0)
    await until_empty(client)
    for heard in requests:
        assert_complete(heard, 60)
        assert (heard.num_repeated == 0 and heard.attempts == {0: {0}}) or heard.attempts == {0: {256}}


async def test_sequences_of_a_killed_worker_go_on_elsewhere(deployment: Deployment, client: Client) -> None:
    await deployment.scheduler()
    await deployment.worker("worker-1", step_s=0.02)
    await deployment.worker("worker-2", step_s=0.02)
    await until(lambda: client.gauge("scheduler-1", "num_workers") == 2.0, what="adoption")
    requests = [await client.submit([number, *PROMPT], max_tokens=150, seed=number) for number in range(10)]
    requests.append(await client.submit(PROMPT, max_tokens=150, seed=10, num_choices=3))
    await until(lambda: all(len(heard.outputs.get(0, [])) > 10 for heard in requests), what="tokens")
    await until(lambda: all(client.gauge(worker, "num_running") for worker in ("worker-1", "worker-2")), what="both")
    await deployment.kill("worker-1")
    await ended(*requests)
    await until_empty(client)
    moved = [heard for heard in requests if heard.attempts[0] != {0}]
    assert moved
    for heard in requests:
        assert_complete(heard, 150)
    await blocks_return(client, "worker-2")


async def test_a_dead_engine_ends_its_worker_and_the_others_go_on(deployment: Deployment, client: Client) -> None:
    await deployment.scheduler(max_losses=1)
    first = await deployment.worker("worker-1")
    second = await deployment.worker("worker-2")
    await until(lambda: client.gauge("scheduler-1", "num_workers") == 2.0, what="adoption")
    poison = await client.submit([EXIT_AT, 5], max_tokens=20)
    async with asyncio.timeout(10.0):
        assert await first.wait() == 1
        assert await second.wait() == 1
    await ended(poison)
    assert [event.outcome for event in poison.endings] == [Outcome.FAILED]
    await until_empty(client)
    del deployment.processes["worker-1"], deployment.processes["worker-2"]
    await deployment.worker("worker-3")
    fine = await client.submit(PROMPT, max_tokens=10)
    await ended(fine)
    assert_complete(fine, 10)


async def test_a_hanging_engine_is_given_up(deployment: Deployment, client: Client) -> None:
    await deployment.scheduler(max_losses=0)
    worker = await deployment.worker(hang_timeout_s=1.0)
    hanging = await client.submit([HANG_AT, 5], max_tokens=20)
    async with asyncio.timeout(10.0):
        assert await worker.wait() == 1
    await ended(hanging)
    assert "finished no iteration" in deployment.log("worker-1")


async def test_a_sequence_that_fails_alone_fails_its_request_only(deployment: Deployment, client: Client) -> None:
    await deployment.scheduler()
    await deployment.worker()
    bad = await client.submit([ERROR_AT, 3], max_tokens=20)
    good = await client.submit(PROMPT, max_tokens=20)
    await ended(bad, good)
    assert_complete(good, 20)
    assert [event.outcome for event in bad.endings] == [Outcome.FAILED]
    await until_empty(client)
    await blocks_return(client, "worker-1")


async def test_cancelled_while_running(deployment: Deployment, client: Client) -> None:
    await deployment.scheduler()
    await deployment.worker(step_s=0.01)
    heard = await client.submit(PROMPT, max_tokens=2000)
    await until(lambda: len(heard.outputs.get(0, [])) > 5, what="tokens")
    client.cancel(heard)
    await ended(heard, timeout_s=2.0)
    assert [event.outcome for event in heard.endings] == [Outcome.CANCELLED]
    await until_empty(client)
    num_tokens = len(heard.outputs[0])
    await blocks_return(client, "worker-1")
    # What was in flight when the cancellation came: an iteration or two, and not the rest of the answer.
    assert len(heard.outputs[0]) - num_tokens < 50


async def test_one_choice_stopped_by_the_router(deployment: Deployment, client: Client) -> None:
    await deployment.scheduler()
    await deployment.worker(step_s=0.01)
    heard = await client.submit(PROMPT, max_tokens=100, num_choices=2)
    await until(lambda: len(heard.outputs.get(1, [])) > 5, what="tokens")
    client.cancel(heard, CancelReason.STOP, choice=1)
    await ended(heard)
    assert heard.outputs[0] == expected_output(PROMPT, 0, 0, 100)
    assert len(heard.outputs[1]) < 100
    assert [event.outcome for event in heard.endings] == [Outcome.FINISHED]


async def test_cancelled_before_any_scheduler_was_there(deployment: Deployment, client: Client) -> None:
    cancelled = await client.submit(PROMPT, max_tokens=2000)
    other = await client.submit(PROMPT, max_tokens=5)
    client.cancel(cancelled)
    await asyncio.sleep(0.2)
    await deployment.scheduler()
    await deployment.worker(step_s=0.01)
    await ended(cancelled, other)
    assert [event.outcome for event in cancelled.endings] == [Outcome.CANCELLED]
    assert_complete(other, 5)
    await until_empty(client)


async def test_cancelled_while_waiting_for_room(deployment: Deployment, client: Client) -> None:
    await deployment.scheduler()
    await deployment.worker(step_s=0.01, max_sequences=1)
    running = await client.submit(PROMPT, max_tokens=100)
    waiting = [await client.submit(PROMPT, max_tokens=2000) for _ in range(3)]
    await until(lambda: len(running.outputs.get(0, [])) > 5, what="tokens")
    for heard in waiting:
        client.cancel(heard)
    await ended(running, *waiting)
    assert_complete(running, 100)
    await until_empty(client)
    for heard in waiting:
        assert [event.outcome for event in heard.endings] == [Outcome.CANCELLED]


async def test_every_stream_echoes_its_own_nonce(deployment: Deployment, client: Client) -> None:
    """WK-07: 50 concurrent streams with random cancels, then SIGTERM for the worker."""
    await deployment.scheduler()
    await deployment.worker(step_s=0.003, max_sequences=16, num_blocks=64)
    chance = random.Random(7)
    nonces = [[chance.randrange(1000) for _ in range(3)] for _ in range(50)]
    requests = [await client.submit([ECHO, *nonce], max_tokens=30) for nonce in nonces]
    cancelled = chance.sample(requests, 12)
    for heard in cancelled:
        await asyncio.sleep(chance.uniform(0.0, 0.05))
        client.cancel(heard)
    await ended(*requests)
    await until_empty(client)
    for nonce, heard in zip(nonces, requests, strict=True):
        output = heard.outputs.get(0, [])
        assert output == (nonce * 10)[: len(output)]
        assert heard.num_gaps == 0 and heard.num_repeated == 0 and len(heard.endings) == 1
        if heard not in cancelled:
            assert output == nonce * 10
    await blocks_return(client, "worker-1")
    started_at = time.monotonic()
    assert await deployment.stop("worker-1") == 0
    assert time.monotonic() - started_at < 5.0


async def test_a_draining_worker_finishes_what_runs(deployment: Deployment, client: Client) -> None:
    await deployment.scheduler()
    await deployment.worker("worker-1", step_s=0.01)
    running = await client.submit(PROMPT, max_tokens=150)
    await until(lambda: len(running.outputs.get(0, [])) > 5, what="tokens")
    stopping = asyncio.create_task(deployment.stop("worker-1"))
    await deployment.worker("worker-2", step_s=0.01)
    await until(lambda: client.gauge("scheduler-1", "num_workers") == 2.0, what="adoption")
    later = await client.submit(PROMPT, max_tokens=20)
    assert await stopping == 0
    await ended(running, later)
    for heard, num_tokens in ((running, 150), (later, 20)):
        assert_complete(heard, num_tokens)
        assert heard.attempts == {0: {0}}


async def test_a_worker_that_cannot_finish_in_time_hands_over(deployment: Deployment, client: Client) -> None:
    await deployment.scheduler()
    await deployment.worker("worker-1", step_s=0.02, drain_timeout_s=0.5)
    running = await client.submit(PROMPT, max_tokens=200)
    await until(lambda: len(running.outputs.get(0, [])) > 5, what="tokens")
    await deployment.worker("worker-2", step_s=0.005)
    await until(lambda: client.gauge("scheduler-1", "num_workers") == 2.0, what="adoption")
    assert await deployment.stop("worker-1") == 0
    await ended(running)
    assert_complete(running, 200)
    assert running.attempts == {0: {0, 1}}


@pytest.mark.parametrize("length", [100, 111, 112, 119, 120, 121, 127, 128, 129, 500])
async def test_prompts_around_the_size_of_the_pool(deployment: Deployment, client: Client, length: int) -> None:
    """KV-01: 8 blocks of 16 tokens; a short prompt behind always completes."""
    await deployment.scheduler()
    await deployment.worker(num_blocks=8, context=4096, step_s=0.001)
    long = await client.submit([number % 1000 for number in range(length)], max_tokens=8)
    short = await client.submit([1, 2, 3, 4, 5], max_tokens=8)
    await ended(long, short)
    assert_complete(short, 8)
    if length + 8 <= 128:
        assert_complete(long, 8)
    else:
        assert [(event.outcome, event.code) for event in long.endings] == [(Outcome.FAILED, "context_length_exceeded")]
    await until_empty(client)
    await blocks_return(client, "worker-1")


async def test_unusable_messages_are_taken_out_and_do_no_harm(deployment: Deployment, client: Client) -> None:
    await deployment.scheduler()
    await deployment.worker()
    for payload in (b"", b"\xc1", b"hello", codec.pack_ids(range(100))):
        await client.bus.enqueue(request_subject(MODEL, Lane.INTERACTIVE, 0), payload, message_id=payload.hex())
    headless = await client.submit([], max_tokens=5)
    good = await client.submit(PROMPT, max_tokens=5)
    await ended(good, headless)
    assert_complete(good, 5)
    assert [event.outcome for event in headless.endings] == [Outcome.FAILED]
    await until_empty(client)


async def test_batch_requests_run_when_interactive_ones_leave_room(deployment: Deployment, client: Client) -> None:
    await deployment.scheduler()
    await deployment.worker(max_sequences=1)
    requests = [await client.submit(PROMPT, max_tokens=20, lane=Lane.BATCH) for _ in range(2)]
    requests.append(await client.submit(PROMPT, max_tokens=20))
    await ended(*requests)
    for heard in requests:
        assert_complete(heard, 20)


async def test_the_broker_restarts_while_all_are_idle(
    deployment: Deployment, client: Client, nats_server: NatsServer
) -> None:
    """Q-04."""
    await deployment.scheduler()
    await deployment.worker()
    before = await client.submit(PROMPT, max_tokens=5)
    await ended(before)
    await nats_server.stop()
    await nats_server.start()
    await until(lambda: client.bus.is_connected, what="connection")
    started_at = time.monotonic()
    after = await client.submit(PROMPT, max_tokens=5)
    await ended(after)
    assert time.monotonic() - started_at < 6.0
    assert_complete(after, 5)


@pytest.mark.parametrize("down_s", [0.0, 5.0, 12.0])
async def test_the_broker_restarts_in_mid_stream(
    deployment: Deployment, client: Client, nats_server: NatsServer, down_s: float
) -> None:
    """Q-04: shorter than the lease, longer, and so long that ownership is lost."""
    await deployment.scheduler()
    await deployment.worker(step_s=0.02)
    requests = [await client.submit(PROMPT, max_tokens=200, seed=seed) for seed in range(4)]
    await until(lambda: all(len(heard.outputs.get(0, [])) > 10 for heard in requests), what="tokens")
    await nats_server.stop()
    await asyncio.sleep(down_s)
    await nats_server.start()
    started_at = time.monotonic()
    await ended(*requests, timeout_s=40.0)
    await until_empty(client)
    for heard in requests:
        await until(lambda heard=heard: heard.gap is None, what="repair")  # type: ignore[misc]  # a default binds it
        assert_complete(heard, 200)
    await blocks_return(client, "worker-1")
    assert time.monotonic() - started_at < 25.0


async def test_a_frozen_scheduler_gives_way_to_its_successor(deployment: Deployment, client: Client) -> None:
    """S2: two schedulers alive. The frozen one wakes up with old leases, and starts anew."""
    await deployment.scheduler("scheduler-1")
    await deployment.worker(step_s=0.02)
    requests = [await client.submit(PROMPT, max_tokens=400, seed=seed) for seed in range(4)]
    await until(lambda: all(len(heard.outputs.get(0, [])) > 10 for heard in requests), what="tokens")
    await deployment.scheduler("scheduler-2")
    deployment.signal("scheduler-1", signal.SIGSTOP)
    await until(lambda: client.gauge("scheduler-2", "num_requests") == 4.0, what="adoption")
    deployment.signal("scheduler-1", signal.SIGCONT)
    await ended(*requests)
    await until_empty(client)
    for heard in requests:
        assert_complete(heard, 400)
        assert heard.attempts == {0: {0}} and heard.num_repeated == 0
    await until(lambda: client.gauge("scheduler-1", "num_requests") == 0.0, what="scheduler-1 holds nothing")
