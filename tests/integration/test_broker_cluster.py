"""Three brokers: the loss of the one that leads is a pause, never an error (N5, G9)."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from tests.e2e.api import TEXT, Answer, ask
from tests.integration.deployment import MODEL, Deployment, until_status
from tests.nats_cluster import NatsCluster, nats_cluster

pytestmark = [pytest.mark.nats, pytest.mark.timeout(500)]

REPLICAS = 3
WAITING_S = 60.0
"""For an election on a slow machine. That nobody sees an error of it is what counts."""
STEP_S = 0.01
TEXT_ANSWER = "The quick brown fox jumps over the lazy dog. " * 8


class System(NamedTuple):
    cluster: NatsCluster
    deployment: Deployment
    apis: list[httpx.AsyncClient]

    async def ask(self, number: int, stream: bool = True) -> Answer:
        api = self.apis[number % len(self.apis)]
        return await ask(api, TEXT, {"text": TEXT_ANSWER}, stream, model=MODEL, max_tokens=2000)


@pytest.fixture
async def system(tmp_path: Path) -> AsyncIterator[System]:
    """Two routers, two schedulers and two workers on three brokers."""
    async with nats_cluster(tmp_path / "brokers") as cluster, asyncio.timeout(450):
        deployment = Deployment(cluster, tmp_path)
        apis: list[httpx.AsyncClient] = []
        try:
            for number in (1, 2):
                url = await deployment.router(f"router-{number}", nats_replicas=REPLICAS)
                apis.append(httpx.AsyncClient(base_url=url, timeout=60, trust_env=False))
                await deployment.scheduler(f"scheduler-{number}", nats_replicas=REPLICAS)
                await deployment.worker(
                    f"worker-{number}", engine="tests.scripted_text", step_s=STEP_S, nats_replicas=REPLICAS
                )
            for api in apis:
                await until_status(api, "/health", 200, timeout_s=180)
            system = System(cluster, deployment, apis)
            for number in range(2):
                assert_whole(await system.ask(number))  # all parts of the system have found each other
            yield system
        finally:
            for api in apis:
                await api.aclose()
            await deployment.close()


def assert_whole(answer: Answer) -> None:
    assert answer.error is None, answer.error
    assert answer.text == TEXT_ANSWER
    assert answer.finish == "stop"


async def test_the_leading_broker_is_killed_under_load(system: System) -> None:
    for name in ("REQUESTS", "TOKENS", "KV_LEASES"):
        assert (await system.cluster.stream_info(name))["config"]["num_replicas"] == REPLICAS
    for led in ("TOKENS", "KV_LEASES"):
        running = [asyncio.create_task(system.ask(number)) for number in range(8)]
        await asyncio.sleep(1.0)
        leader = await system.cluster.leader(led)
        await leader.kill()
        killed_at = time.monotonic()
        # Asked while nobody leads: each waits for the election, for less than a patient client waits.
        late = [asyncio.create_task(system.ask(number, stream=bool(number % 4))) for number in range(8)]
        for answer in await asyncio.gather(*running, *late):
            assert_whole(answer)
        assert time.monotonic() - killed_at < WAITING_S + len(TEXT_ANSWER) * STEP_S
        await leader.start()
    for answer in await asyncio.gather(*(system.ask(number) for number in range(4))):
        assert_whole(answer)
