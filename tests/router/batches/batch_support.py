"""Batches over HTTP on the in-memory broker, with a scripted worker for the batch lane."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import httpx

from headrace_router.settings import RouterSettings
from headrace_shared.memory_bus import MemoryBus
from headrace_shared.messages import Lane, Request
from tests.byte_model import MODEL
from tests.router.support import Router, Script, ScriptedWorker, running_router, until

TEXT = "/v1/completions"
OVER = ("completed", "failed", "expired", "cancelled")


class Batching(NamedTuple):
    router: Router
    worker: ScriptedWorker
    """Of the batch lane."""

    @property
    def requests(self) -> list[Request]:
        return self.worker.requests


@contextlib.asynccontextmanager
async def batching(script: Script, **settings: Any) -> AsyncIterator[Batching]:
    given = RouterSettings(port=0, drain_delay_s=0.0, drain_timeout_s=5.0, **settings)
    async with running_router(script, settings=given) as router, batch_worker(router, script) as worker:
        yield Batching(router, worker)


@contextlib.asynccontextmanager
async def batch_worker(router: Router, script: Script) -> AsyncIterator[ScriptedWorker]:
    worker = ScriptedWorker(MemoryBus(router.broker), script, lane=Lane.BATCH)
    task = asyncio.create_task(worker.run())
    await until(lambda: worker.has_started)
    try:
        yield worker
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def line(number: int, prompt: str = "Hi", **changes: Any) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 8, **changes.pop("body", {})}
    return {"custom_id": f"line-{number}", "method": "POST", "url": TEXT, "body": body, **changes}


def jsonl(lines: list[Any]) -> bytes:
    return b"".join(json.dumps(told).encode() + b"\n" for told in lines)


async def upload(client: httpx.AsyncClient, content: bytes, headers: dict[str, str] | None = None) -> str:
    reply = await client.post(
        "/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", content)}, headers=headers
    )
    assert reply.status_code == 200, reply.text
    file_id: str = reply.json()["id"]
    return file_id


async def create(
    client: httpx.AsyncClient, lines: list[Any], headers: dict[str, str] | None = None, **fields: Any
) -> dict[str, Any]:
    file_id = await upload(client, jsonl(lines), headers)
    body = {"input_file_id": file_id, "endpoint": TEXT, "completion_window": "24h", **fields}
    reply = await client.post("/v1/batches", json=body, headers=headers)
    assert reply.status_code == 200, reply.text
    batch: dict[str, Any] = reply.json()
    return batch


async def until_status(
    client: httpx.AsyncClient,
    batch: dict[str, Any],
    *statuses: str,
    headers: dict[str, str] | None = None,
    timeout_s: float = 60.0,
) -> dict[str, Any]:
    """How the batch is when it has one of them."""
    async with asyncio.timeout(timeout_s):
        while True:
            reply = await client.get(f"/v1/batches/{batch['id']}", headers=headers)
            assert reply.status_code == 200, reply.text
            now: dict[str, Any] = reply.json()
            if now["status"] in statuses:
                return now
            assert now["status"] not in OVER, now
            await asyncio.sleep(0.02)


async def lines_of(
    client: httpx.AsyncClient, file_id: str | None, headers: dict[str, str] | None = None
) -> dict[str, dict[str, Any]]:
    """By custom id; each may be there once."""
    if file_id is None:
        return {}
    reply = await client.get(f"/v1/files/{file_id}/content", headers=headers)
    assert reply.status_code == 200, reply.text
    told = [json.loads(text) for text in reply.text.splitlines()]
    found = {one["custom_id"]: one for one in told}
    assert len(found) == len(told), [one["custom_id"] for one in told]
    return found
