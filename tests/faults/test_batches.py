"""kill -9 of whoever works on a batch: every line is answered once all the same, and nobody waits behind it."""

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace_shared.broker import NatsServer
from headrace_shared.codec import decode
from headrace_shared.leases import LeaseRecord
from headrace_shared.subjects import BATCH_LEASES, BATCH_RESULTS
from tests.e2e.api import TEXT
from tests.faults.fleet import Fleet
from tests.faults.script import MODEL, shape
from tests.integration.deployment import until_empty

pytestmark = [pytest.mark.nats, pytest.mark.e2e, pytest.mark.timeout(600)]

NUM_LINES = 60
NUM_TOKENS = 24
PATIENCE_S = 120.0
"""On a machine that others use as well."""
SHAPE = shape(0.03, workers=1, router={"batch_concurrency": 8})


def text_of(batch: str, number: int) -> str:
    nonce = f"{batch}{number:03d}-"
    return (nonce * NUM_TOKENS)[:NUM_TOKENS]


def lines(batch: str) -> bytes:
    told = []
    for number in range(NUM_LINES):
        prompt = json.dumps({"echo": f"{batch}{number:03d}-"})
        body = {"model": MODEL, "prompt": prompt, "max_tokens": NUM_TOKENS}
        told.append({"custom_id": f"{batch}-{number}", "method": "POST", "url": TEXT, "body": body})
    return b"".join(json.dumps(line).encode() + b"\n" for line in told)


class Api:
    """Asks any router that answers."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def call(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                for url in self._fleet.urls:
                    try:
                        async with httpx.AsyncClient(base_url=url, timeout=10.0, trust_env=False) as http:
                            reply = await http.request(method, path, **arguments)
                    except httpx.HTTPError:
                        continue
                    if reply.status_code < 500:
                        assert reply.status_code == 200, reply.text
                        return reply
                await asyncio.sleep(0.1)

    async def create(self, name: str) -> str:
        file = await self.call(
            "POST", "/v1/files", data={"purpose": "batch"}, files={"file": (f"{name}.jsonl", lines(name))}
        )
        body = {"input_file_id": file.json()["id"], "endpoint": TEXT, "completion_window": "24h"}
        batch_id: str = (await self.call("POST", "/v1/batches", json=body)).json()["id"]
        return batch_id

    async def batch(self, batch_id: str) -> dict[str, Any]:
        batch: dict[str, Any] = (await self.call("GET", f"/v1/batches/{batch_id}")).json()
        return batch

    async def until_done(self, batch_id: str, num_lines: int) -> dict[str, Any]:
        async with asyncio.timeout(PATIENCE_S):
            while (batch := await self.batch(batch_id))["request_counts"]["completed"] < num_lines:  # noqa: ASYNC110 - another process's state
                await asyncio.sleep(0.1)
            return batch

    async def until_over(self, batch_id: str) -> dict[str, Any]:
        async with asyncio.timeout(PATIENCE_S):
            while not (batch := await self.batch(batch_id))["completed_at"]:
                assert batch["status"] in ("validating", "in_progress", "finalizing"), batch
                await asyncio.sleep(0.1)
            return batch

    async def check(self, name: str, batch: dict[str, Any]) -> None:
        assert batch["request_counts"] == {"total": NUM_LINES, "completed": NUM_LINES, "failed": 0}, batch
        content = (await self.call("GET", f"/v1/files/{batch['output_file_id']}/content")).text
        told = [json.loads(line) for line in content.splitlines()]
        assert Counter(line["custom_id"] for line in told) == Counter(f"{name}-{n}" for n in range(NUM_LINES))
        for line in told:
            number = int(line["custom_id"].rpartition("-")[2])
            assert line["response"]["body"]["choices"][0]["text"] == text_of(name, number)


async def owner_of(fleet: Fleet, batch_id: str) -> str:
    """The place of the router that runs it."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            entry = await fleet.client.bus.get(BATCH_LEASES.name, f"batch.{batch_id}")
            holder = decode(entry.value, LeaseRecord).holder if entry is not None else ""
            for place in fleet.places("router"):
                if fleet.id_of(place) == holder:
                    return place
            await asyncio.sleep(0.1)


async def test_a_batch_survives_its_router_a_scheduler_and_a_restart_of_everything(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    async with Fleet.of(nats_server, tmp_path, SHAPE) as fleet:
        api = Api(fleet)
        first = await api.create("a")
        await api.until_done(first, 10)
        owner = await owner_of(fleet, first)
        await fleet.kill(owner)
        assert 10 <= (await api.batch(first))["request_counts"]["completed"] < NUM_LINES
        await api.until_done(first, 25)
        await fleet.kill("scheduler-1")
        # Whoever waits for an answer is not behind the batch.
        reply = await api.call("POST", TEXT, json={"model": MODEL, "prompt": '{"text": "hello"}', "max_tokens": 8})
        assert reply.json()["choices"][0]["text"] == "hello"
        await api.check("a", await api.until_over(first))

        second = await api.create("b")
        await api.until_done(second, 10)
        places = [place for kind in ("router", "scheduler", "worker") for place in fleet.places(kind)]
        for place in places:
            await fleet.deployment.kill(fleet.id_of(place))
        await nats_server.kill()
        await nats_server.start()
        for place in places:
            await fleet.start(place)
        await fleet.until_ready()
        batch = await api.batch(second)
        assert 10 <= batch["request_counts"]["completed"] < NUM_LINES
        await api.check("b", await api.until_over(second))
        assert await fleet.client.bus.num_messages(BATCH_RESULTS.name) == 0
        await until_empty(fleet.client)
