"""A scheduler that was frozen until others owned its requests, and a broker that has forgotten what it had seen."""

import asyncio
import signal
from typing import Any

import pytest

from headrace_scheduler.worker_link import HEARTBEAT_S
from headrace_shared import codec
from headrace_shared.broker import NatsServer
from headrace_shared.messages import Lane
from headrace_shared.subjects import ACK_WAIT_S, Queue
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
from tests.patience import PATIENCE_S
from tests.queues import request_subject

pytestmark = pytest.mark.nats


async def consumer_info(client: Client) -> dict[str, Any]:
    name = Queue(MODEL, Lane.INTERACTIVE).consumer.name
    return await client.bus._streams.must(f"CONSUMER.INFO.REQUESTS.{name}")


async def test_a_scheduler_frozen_beyond_the_ack_wait_touches_nothing_that_its_successor_owns(
    deployment: Deployment, client: Client
) -> None:
    """Neither by an acknowledgement (the message would be gone) nor by giving back (a third would get it)."""
    await deployment.scheduler("scheduler-1")
    await deployment.worker(step_s=0.02, max_sequences=2)
    requests = [await client.submit(PROMPT, max_tokens=1200, seed=seed) for seed in range(2)]
    await until(lambda: all(len(heard.outputs.get(0, [])) > 10 for heard in requests), what="tokens")
    requests += [await client.submit(PROMPT, max_tokens=20, seed=seed) for seed in range(2, 5)]
    await until(lambda: client.gauge("scheduler-1", "num_requests") == 5.0, what="all are taken")
    await deployment.scheduler("scheduler-2")
    await until(lambda: "scheduler-2" in client.telemetry, what="the second scheduler")
    deployment.signal("scheduler-1", signal.SIGSTOP)
    in_time_s = ACK_WAIT_S + PATIENCE_S
    await until(lambda: client.gauge("scheduler-2", "num_requests") == 5.0, timeout_s=in_time_s, what="redelivery")
    before = await consumer_info(client)
    assert before["num_redelivered"] == 3
    deployment.signal("scheduler-1", signal.SIGCONT)
    await until(lambda: "ownership lost" in deployment.log("scheduler-1"), what="scheduler-1 starts anew")
    await asyncio.sleep(1.0)
    after = await consumer_info(client)
    assert after["delivered"]["consumer_seq"] == before["delivered"]["consumer_seq"]
    assert await client.num_queued() == 5 and client.gauge("scheduler-2", "num_requests") == 5.0
    await ended(*requests)
    await until_empty(client)
    for heard, num_tokens in zip(requests, (1200, 1200, 20, 20, 20), strict=True):
        assert_complete(heard, num_tokens)
        assert heard.num_repeated == 0


async def test_a_request_queued_again_after_the_broker_forgot_it_does_not_run_again(
    deployment: Deployment, client: Client, nats_server: NatsServer
) -> None:
    """A work queue's memory of message ids goes with its acknowledged messages when the broker restarts."""
    await deployment.scheduler()
    await deployment.worker()
    heard = await client.submit(PROMPT, max_tokens=20)
    await ended(heard)
    await until_empty(client)
    # A worker tells its tokens again after a restart of the broker, until it knows that the scheduler has seen the end.
    # The next heartbeats tell it; then repeated tokens can only mean that the request ran again.
    await asyncio.sleep(3 * HEARTBEAT_S)
    await nats_server.kill()
    await nats_server.start()
    await until(lambda: client.bus.is_connected, what="reconnect")
    sequence = await client.bus.enqueue(
        request_subject(MODEL, Lane.INTERACTIVE, 0),
        codec.encode(heard.request),
        message_id=heard.request.request_id,
    )
    assert sequence > heard.stream_sequence, "stored again"
    await until_empty(client)
    other = await client.submit(PROMPT, max_tokens=20, seed=1)
    await ended(other)
    assert_complete(heard, 20)
    assert heard.num_repeated == 0
