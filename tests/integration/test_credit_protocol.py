"""Scheduler and worker processes on a real broker, with the scripted engine in place of a model."""

import asyncio
import random
import time

import pytest

from headrace_shared import codec
from headrace_shared.messages import CancelReason, Lane, Outcome
from tests.integration.deployment import (
    MODEL,
    PROMPT,
    Client,
    Deployment,
    assert_complete,
    blocks_return,
    ended,
    until,
    until_empty,
)
from tests.queues import request_subject
from tests.scripted_engine import ECHO, ERROR_AT, expected_output

pytestmark = pytest.mark.nats


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
    await ended(heard, timeout_s=15.0)  # the whole answer takes 20 s
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
    """50 concurrent streams with random cancels, then SIGTERM for the worker."""
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
    assert time.monotonic() - started_at < 20.0


async def test_prompts_around_the_size_of_the_pool(deployment: Deployment, client: Client) -> None:
    """8 blocks of 16 tokens. prompt + max_tokens <= 128 runs, anything else is refused, by one formula; a short
    prompt behind it always completes."""
    await deployment.scheduler()
    await deployment.worker(num_blocks=8, context=4096, step_s=0.001)
    for length in (100, 111, 112, 119, 120, 121, 127, 128, 129, 500):
        long = await client.submit([number % 1000 for number in range(length)], max_tokens=8)
        short = await client.submit([1, 2, 3, 4, 5], max_tokens=8)
        await ended(long, short)
        assert_complete(short, 8)
        if length + 8 <= 128:
            assert_complete(long, 8)
        else:
            assert [(event.outcome, event.code) for event in long.endings] == [
                (Outcome.FAILED, "context_length_exceeded")
            ]
        cancelled = await client.submit([number % 1000 for number in range(length)], max_tokens=8)
        client.cancel(cancelled)
        await ended(cancelled)
        assert len(cancelled.endings) == 1
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
