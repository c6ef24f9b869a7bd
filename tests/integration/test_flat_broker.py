"""What the broker holds for us does not grow with requests, nor with processes that come and go."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import httpx
import pytest

from headrace_scheduler.intake import NUM_PULLERS
from headrace_shared.broker import NatsServer
from headrace_shared.messages import Lane
from headrace_shared.subjects import queues_of
from tests.integration.deployment import MODEL, Client, Deployment, until_empty, until_status

pytestmark = pytest.mark.nats


class Held(NamedTuple):
    streams: int
    consumers: int
    queue_consumers: frozenset[str]
    subscriptions: dict[str, int]
    """By connection."""


MOST_INBOXES = NUM_PULLERS + 16 + 8
"""Of a scheduler: pulls that help, one for each of the 16 queues without a tenant, and few others."""


class Monitor:
    """The broker's own account."""

    def __init__(self, http: httpx.AsyncClient, client: Client) -> None:
        self._http = http
        self._client = client

    async def router_subjects(self) -> list[str]:
        """Of the connection for core messages, without the inboxes."""
        connections = await self._connections()
        return sorted(
            subject
            for each in connections
            if each["name"] == "router-1-core"
            for subject in each["subscriptions_list"]
            if not subject.startswith("_INBOX")
        )

    async def held(self) -> Held:
        jetstream = (await self._http.get("/jsz")).json()
        names = (await self._client.bus._streams.must("CONSUMER.NAMES.REQUESTS"))["consumers"]
        subscriptions = {each["name"]: each["subscriptions"] for each in await self._connections()}
        # It keeps an inbox for each pull that was ever under way beside others: anything up to that is flat.
        subscriptions["scheduler-1-store"] = max(MOST_INBOXES, subscriptions.get("scheduler-1-store", 0))
        return Held(jetstream["streams"], jetstream["consumers"], frozenset(names), subscriptions)

    async def until_held(self, wanted: Held) -> None:
        """Ephemeral consumers of those who left go after a few seconds."""
        held = await self.held()
        for _ in range(240):
            if held == wanted:
                return
            await asyncio.sleep(0.25)
            held = await self.held()
        assert held == wanted

    async def _connections(self) -> list[dict[str, Any]]:
        connections: list[dict[str, Any]] = (await self._http.get("/connz?subs=1")).json()["connections"]
        return connections


@pytest.fixture
async def monitor(nats_server: NatsServer, client: Client) -> AsyncIterator[Monitor]:
    async with httpx.AsyncClient(base_url=nats_server.monitor_url, trust_env=False) as http:
        yield Monitor(http, client)


async def test_requests_and_restarts_leave_nothing_in_the_broker(
    deployment: Deployment, client: Client, monitor: Monitor
) -> None:
    url, _, _ = await asyncio.gather(
        deployment.router(), deployment.scheduler(), deployment.worker(engine="tests.scripted_text")
    )
    body = {"model": MODEL, "prompt": "aaaa", "max_tokens": 30}
    async with httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as api:
        await until_status(api, "/health", 200)

        async def ask(number: int) -> None:
            reply = await api.post("/v1/completions", json=body | {"stream": bool(number % 2)})
            assert reply.status_code == 200, reply.text

        await asyncio.gather(*map(ask, range(16)))
        await until_empty(client)
        before = await monitor.held()
        assert before.queue_consumers == {queue.consumer.name for lane in Lane for queue in queues_of(MODEL, lane, 0)}
        subjects = await monitor.router_subjects()
        assert subjects.count("tokens.router-1.*") == 1

        running = [asyncio.create_task(ask(number)) for number in range(64)]
        await asyncio.sleep(0.1)
        assert await monitor.router_subjects() == subjects, "none for a request"
        await asyncio.gather(*running)
        for _ in range(2):
            await deployment.kill("scheduler-1")
            await deployment.kill("worker-1")
            await asyncio.gather(deployment.scheduler(), deployment.worker(engine="tests.scripted_text"))
            await asyncio.gather(*map(ask, range(16)))
        await until_empty(client)
        await monitor.until_held(before)
