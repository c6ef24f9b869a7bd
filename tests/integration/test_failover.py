"""Schedulers, workers and engines that die, freeze, drain or are replaced."""

import asyncio
import signal
import time

import pytest

from headrace_shared.messages import Outcome
from tests.integration.deployment import (
    PROMPT,
    Client,
    Deployment,
    assert_complete,
    blocks_return,
    ended,
    until,
    until_empty,
)
from tests.patience import PATIENCE_S
from tests.scripted_engine import EXIT_AT, HANG_AT

pytestmark = pytest.mark.nats


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


async def test_requests_of_a_scheduler_that_has_lost_its_only_worker_go_to_its_peer_s(
    deployment: Deployment, client: Client
) -> None:
    """Each scheduler leases one worker, and one worker is gone for good."""
    await deployment.scheduler("scheduler-1")
    await deployment.worker("worker-1", step_s=0.03)
    requests = [await client.submit(PROMPT, max_tokens=500, seed=seed, num_choices=1 + seed % 2) for seed in range(4)]
    await until(lambda: all(len(heard.outputs.get(0, [])) > 10 for heard in requests), what="tokens")
    await deployment.scheduler("scheduler-2")
    await until(lambda: "scheduler-2" in client.telemetry, what="the second scheduler")
    await deployment.worker("worker-2", step_s=0.002)
    await until(lambda: client.gauge("scheduler-2", "num_workers") == 1.0, what="adoption by the second scheduler")
    await deployment.kill("worker-1")
    await ended(*requests)
    await until_empty(client)
    for heard in requests:
        assert_complete(heard, 500)
        assert heard.attempts[0] != {0}
    await blocks_return(client, "worker-2")


async def test_a_stopped_scheduler_hands_over_at_once(deployment: Deployment, client: Client) -> None:
    await deployment.scheduler("scheduler-1")
    await deployment.worker(step_s=0.02, max_sequences=4)
    await until(lambda: client.gauge("scheduler-1", "num_workers") == 1.0, what="adoption")
    await deployment.scheduler("scheduler-2")
    requests = [await client.submit(PROMPT, max_tokens=60, seed=seed) for seed in range(16)]
    await until(lambda: all(len(heard.outputs.get(0, [])) > 5 for heard in requests[:4]), what="tokens")
    started_at = time.monotonic()
    assert await deployment.stop("scheduler-1") == 0
    assert time.monotonic() - started_at < 20.0
    await ended(*requests, timeout_s=PATIENCE_S)
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
    async with asyncio.timeout(PATIENCE_S):
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
    async with asyncio.timeout(PATIENCE_S):
        assert await worker.wait() == 1
    await ended(hanging)
    assert "finished no iteration" in deployment.log("worker-1")


async def test_a_stopped_worker_finishes_what_runs_and_lets_others_have_it(
    deployment: Deployment, client: Client
) -> None:
    await deployment.scheduler()
    await deployment.worker("worker-1", step_s=0.01)
    running = await client.submit(PROMPT, max_tokens=500)
    await until(lambda: len(running.outputs.get(0, [])) > 5, what="tokens")
    stopping = asyncio.create_task(deployment.stop("worker-1"))
    await deployment.worker("worker-2", step_s=0.01)
    await until(lambda: client.gauge("worker-2", "num_blocks"), what="the second worker")
    later = await client.submit(PROMPT, max_tokens=20)
    assert await stopping == 0
    await ended(running, later)
    for heard, num_tokens in ((running, 500), (later, 20)):
        assert_complete(heard, num_tokens)
    assert later.attempts == {0: {0}}


async def test_a_worker_that_cannot_finish_in_time_hands_over(deployment: Deployment, client: Client) -> None:
    await deployment.scheduler()
    await deployment.worker("worker-1", step_s=0.02, drain_timeout_s=0.5)
    running = await client.submit(PROMPT, max_tokens=1000)
    await until(lambda: len(running.outputs.get(0, [])) > 5, what="tokens")
    await deployment.worker("worker-2", step_s=0.002)
    await until(lambda: client.gauge("scheduler-1", "num_workers") == 2.0, what="adoption")
    assert await deployment.stop("worker-1") == 0
    await ended(running)
    assert_complete(running, 1000)
    assert running.attempts == {0: {0, 1}}


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
