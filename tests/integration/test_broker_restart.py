"""The broker goes away and comes back under schedulers and workers."""

import asyncio
import time

import pytest

from headrace_shared.broker import NatsServer
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

pytestmark = pytest.mark.nats


async def test_the_broker_restarts_while_all_are_idle(
    deployment: Deployment, client: Client, nats_server: NatsServer
) -> None:
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
    assert time.monotonic() - started_at < PATIENCE_S
    assert_complete(after, 5)


@pytest.mark.parametrize("down_s", [0.0, 5.0, 12.0])
async def test_the_broker_restarts_in_mid_stream(
    deployment: Deployment, client: Client, nats_server: NatsServer, down_s: float
) -> None:
    """Shorter than the lease, longer, and so long that ownership is lost."""
    await deployment.scheduler()
    await deployment.worker(step_s=0.02)
    requests = [await client.submit(PROMPT, max_tokens=200, seed=seed) for seed in range(4)]
    await until(lambda: all(len(heard.outputs.get(0, [])) > 10 for heard in requests), what="tokens")
    await nats_server.stop()
    await asyncio.sleep(down_s)
    await nats_server.start()
    await ended(*requests)
    await until_empty(client)
    for heard in requests:
        await until(lambda heard=heard: heard.gap is None, what="repair")  # type: ignore[misc]  # a default binds it
        assert_complete(heard, 200)
    await blocks_return(client, "worker-1")
