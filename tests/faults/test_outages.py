"""The broker freezes, a worker is cut off from it, a scheduler joins: what runs goes on soon, and only once."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from headrace_shared.broker import NatsServer
from headrace_shared.leases import LEASE_TTL_S
from headrace_shared.messages import Lane
from headrace_shared.subjects import Queue
from tests.chaos_proxy import ChaosProxy
from tests.faults.crowd import Call, Crowd
from tests.faults.fleet import Fleet
from tests.faults.script import echo_job, shape
from tests.integration.deployment import (
    MODEL,
    PROMPT,
    Client,
    Deployment,
    assert_complete,
    ended,
    until,
    until_empty,
)

pytestmark = pytest.mark.nats

FROZEN_S = LEASE_TTL_S + 0.5
RECOVERY_S = 25.0
START_S = 90.0
"""However slow the machine."""


async def test_a_broker_that_freezes_for_longer_than_a_lease_stalls_streams_only_that_long(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    """Two schedulers, each with a worker of its own. The workers drop everything, and the queue offers it anew."""
    async with Fleet.of(nats_server, tmp_path, shape(0.02)) as fleet:
        jobs = [echo_job(f"{number:08x}", 400) for number in range(8)]
        crowd = Crowd(fleet.urls)
        calls = [asyncio.create_task(crowd.ask("/v1/completions", job.body)) for job in jobs]
        await until(lambda: crowd.num_events > 100, what="tokens")
        assert nats_server.pid is not None
        os.kill(nats_server.pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(FROZEN_S)
        finally:
            os.kill(nats_server.pid, signal.SIGCONT)
        done: list[Call] = await asyncio.gather(*calls)
        for call, job in zip(done, jobs, strict=True):
            assert call.outcome() == job.expected and not call.problem, call
            assert max(call.stalls_s) < FROZEN_S + RECOVERY_S, sorted(call.stalls_s)[-3:]
        await until_empty(fleet.client)


async def test_a_worker_that_is_cut_off_drops_everything_and_comes_back_empty(
    deployment: Deployment, client: Client, nats_server: NatsServer
) -> None:
    """A link that swallows everything: its peers go on, and when it is back nobody hears from it of what it had."""
    async with ChaosProxy(nats_server.port) as proxy:
        await deployment.scheduler()
        await deployment.worker("worker-1", step_s=0.02, nats_url=f"nats://127.0.0.1:{proxy.port}")
        await deployment.worker("worker-2", step_s=0.01)
        await until(lambda: client.gauge("scheduler-1", "num_workers") == 2.0, timeout_s=START_S, what="adoption")
        requests = [await client.submit([seed, *PROMPT], max_tokens=300, seed=seed) for seed in range(6)]
        await until(lambda: all(len(heard.outputs.get(0, [])) > 10 for heard in requests), what="tokens")
        proxy.stall()
        noticed_s = await until(lambda: "it is silent" in deployment.log("scheduler-1"), what="notice")
        assert noticed_s < 2.0 + 8.0
        await until(lambda: "cut off from the broker" in deployment.log("worker-1"), what="the worker's own notice")
        proxy.flow()
        await ended(*requests)
        await until_empty(client)
        for heard in requests:
            assert_complete(heard, 300)
            assert heard.attempts[0] <= {0, 1}
        assert any(heard.attempts[0] == {0, 1} for heard in requests)
        await until(lambda: client.gauge("scheduler-1", "num_workers") == 2.0, what="the first worker again")
        again = [await client.submit([seed, *PROMPT], max_tokens=20, seed=seed) for seed in range(6)]
        await ended(*again)
        for heard in again:
            assert_complete(heard, 20)


async def test_a_scheduler_that_joins_gets_its_share_and_no_sequence_starts_again(
    deployment: Deployment, client: Client
) -> None:
    """The answers take longer than the ack wait, and each is delivered once."""
    await deployment.scheduler("scheduler-1")
    for number in range(2):
        await deployment.worker(f"worker-{number + 1}", step_s=0.04)
    await until(lambda: client.gauge("scheduler-1", "num_workers") == 2.0, timeout_s=START_S, what="adoption")
    requests = [
        await client.submit([seed, *PROMPT], max_tokens=400, seed=seed, num_choices=1 + seed % 2) for seed in range(8)
    ]
    await until(lambda: all(len(heard.outputs.get(0, [])) > 10 for heard in requests), what="tokens")
    await deployment.scheduler("scheduler-2")
    await until(lambda: client.gauge("scheduler-2", "num_workers") == 1.0, timeout_s=START_S, what="its share")
    await until(lambda: client.gauge("scheduler-1", "num_workers") == 1.0, what="a share less")
    later = [await client.submit([seed, *PROMPT], max_tokens=50, seed=seed) for seed in range(8)]
    await ended(*requests, *later)
    await until_empty(client)
    for heard in requests:
        assert_complete(heard, 400)
        assert heard.num_repeated == 0 and all(attempts == {0} for attempts in heard.attempts.values())
    for heard in later:
        assert_complete(heard, 50)
    consumer = Queue(MODEL, Lane.INTERACTIVE).consumer.name
    info = await client.bus._streams.must(f"CONSUMER.INFO.REQUESTS.{consumer}")
    assert info["delivered"]["consumer_seq"] == len(requests) + len(later)


async def test_a_request_whose_worker_dies_before_its_first_token_is_taken_up_within_seconds(
    deployment: Deployment, client: Client
) -> None:
    await deployment.scheduler()
    await deployment.worker("worker-1", step_s=1.0)
    await until(lambda: client.gauge("scheduler-1", "num_workers") == 1.0, timeout_s=START_S, what="adoption")
    early = await client.submit(PROMPT, max_tokens=30)
    await until(lambda: client.gauge("worker-1", "num_running") == 1.0, what="it runs")
    assert not early.outputs
    await deployment.worker("worker-2")
    await deployment.kill("worker-1")
    await ended(early, timeout_s=30.0)
    assert_complete(early, 30)
