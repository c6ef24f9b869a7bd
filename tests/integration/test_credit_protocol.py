"""Scheduler and worker processes on a real broker, with the scripted engine in place of a model."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headrace_shared.broker import NatsServer
from headrace_shared.messages import FinishReason, Outcome
from tests.integration.deployment import Client, Deployment, ended, until_empty
from tests.scripted_engine import expected_output

pytestmark = pytest.mark.nats

PROMPT = list(range(100, 140))


@pytest.fixture
async def nats_server(tmp_path: Path) -> AsyncIterator[NatsServer]:
    server = NatsServer(tmp_path / "nats", sync_interval="100ms", max_memory_bytes=1 << 30)
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def deployment(nats_server: NatsServer, tmp_path: Path) -> AsyncIterator[Deployment]:
    deployment = Deployment(nats_server, tmp_path)
    yield deployment
    await deployment.close()


@pytest.fixture
async def client(nats_server: NatsServer) -> AsyncIterator[Client]:
    async with Client.connect(nats_server.url) as client:
        yield client


async def test_requests_end_exactly_once(deployment: Deployment, client: Client) -> None:
    await deployment.scheduler()
    await deployment.worker()
    requests = [await client.submit(PROMPT, max_tokens=40, seed=seed) for seed in range(20)]
    requests.append(await client.submit(PROMPT, max_tokens=20, seed=99, num_choices=3))
    await ended(*requests)
    await until_empty(client)
    for seed, heard in enumerate(requests[:20]):
        assert heard.outputs == {0: expected_output(PROMPT, seed, 0, 40)}
        assert heard.finishes == {0: FinishReason.LENGTH}
    assert requests[20].outputs == {choice: expected_output(PROMPT, 99, choice, 20) for choice in range(3)}
    for heard in requests:
        assert [event.outcome for event in heard.endings] == [Outcome.FINISHED]
        assert heard.gaps == [] and heard.num_repeated == 0
        assert (await client.log_of(heard))[-1] == heard.endings[0]
