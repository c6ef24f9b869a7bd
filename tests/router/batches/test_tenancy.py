"""A batch counts as its tenant's: its rates, its concurrency, its key, what is kept of it."""

import asyncio

import pytest

from headrace_shared.messages import Request
from headrace_shared.subjects import KEYS
from tests.byte_model import MODEL
from tests.router.batches.batch_support import TEXT, batching, create, jsonl, line, lines_of, until_status, upload
from tests.router.keys import add_key, until_known
from tests.router.support import ScriptedWorker, says, until


async def test_lines_run_as_their_tenant_and_within_its_limits() -> None:
    async with batching(says("x"), require_keys=True) as own:
        client, bus = own.router.client, own.router.bus
        mine = await add_key(bus, tenant="mine", flow=3, models=(MODEL,), weight=2.0, requests_per_minute=20)
        theirs = await add_key(bus, tenant="theirs")
        for key in (mine, theirs):
            await until_known(own.router, key)
        lines = [line(1), line(2), line(3, body={"model": "other"}), line(4, body={"max_tokens": 100})]
        batch = await create(client, lines, mine)
        done = await until_status(client, batch, "completed", headers=mine)
        assert done["request_counts"] == {"total": 4, "completed": 3, "failed": 1}
        errors = await lines_of(client, done["error_file_id"], mine)
        assert errors["line-3"]["response"]["status_code"] == 403
        assert {(request.tenant, request.weight) for request in own.requests} == {("mine", 2.0)}
        assert (await client.get(f"/v1/batches/{batch['id']}", headers=theirs)).status_code == 404
        assert (await client.post(f"/v1/batches/{batch['id']}/cancel", headers=theirs)).status_code == 404
        assert (await client.get("/v1/batches", headers=theirs)).json()["data"] == []
        assert (await client.get(f"/v1/files/{done['output_file_id']}", headers=theirs)).status_code == 404
        stolen = {"input_file_id": batch["input_file_id"], "endpoint": TEXT, "completion_window": "24h"}
        assert (await client.post("/v1/batches", json=stolen, headers=theirs)).status_code == 404
        assert (await client.post("/v1/batches", json=stolen)).status_code == 401


async def test_a_batch_leaves_half_of_the_rate_to_who_cannot_wait() -> None:
    async with batching(says("x"), require_keys=True) as own:
        client = own.router.client
        key = await add_key(own.router.bus, requests_per_minute=6)
        await until_known(own.router, key)
        batch = await create(client, [line(n) for n in range(8)], key)
        await until(lambda: len(own.requests) >= 3)
        await asyncio.sleep(0.7)
        assert 3 <= len(own.requests) <= 4
        for _ in range(2):
            body = {"model": MODEL, "prompt": "Hi", "max_tokens": 4}
            assert (await client.post(TEXT, json=body, headers=key)).status_code == 200
        # What is left waits for its minute, and is not lost.
        counts = (await until_status(client, batch, "in_progress", headers=key))["request_counts"]
        assert counts["failed"] == 0 and counts["total"] == 8


async def test_a_revoked_key_ends_what_it_began() -> None:
    hold = asyncio.Event()

    async def script(worker: ScriptedWorker, request: Request) -> None:
        await hold.wait()
        await says("x")(worker, request)

    async with batching(script, require_keys=True, batch_concurrency=1) as own:
        client, bus = own.router.client, own.router.bus
        mine, same = await add_key(bus, tenant="mine"), await add_key(bus, tenant="mine")
        for key in (mine, same):
            await until_known(own.router, key)
        batch = await create(client, [line(n) for n in range(3)], mine)
        await until(lambda: len(own.requests) == 1)
        await bus.remove(KEYS.name, mine["Authorization"].removeprefix("Bearer hr-")[:12])
        hold.set()
        done = await until_status(client, batch, "completed", headers=same)
        assert done["request_counts"] == {"total": 3, "completed": 1, "failed": 2}
        errors = await lines_of(client, done["error_file_id"], same)
        assert {one["response"]["status_code"] for one in errors.values()} == {401} and len(own.requests) == 1


async def test_a_key_keeps_half_of_its_calls_for_who_waits() -> None:
    release = asyncio.Event()

    async def script(worker: ScriptedWorker, request: Request) -> None:
        await release.wait()
        await says("abc")(worker, request)

    async with batching(script, require_keys=True) as own:
        key = await add_key(own.router.bus, max_concurrent=6)
        await until_known(own.router, key)
        client = own.router.client
        batch = await create(client, [line(n) for n in range(20)], key)
        await until(lambda: len(own.requests) == 3)
        await asyncio.sleep(0.3)
        assert len(own.requests) == 3
        release.set()
        done = await until_status(client, batch, "completed", headers=key)
        assert done["request_counts"]["completed"] == 20


async def test_only_so_many_batches_that_are_over_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace_router.batches.desk.MAX_KEPT", 3)
    async with batching(says("x")) as own:
        client = own.router.client
        ids = []
        for _ in range(5):
            batch = await create(client, [line(1)])
            ids.append(batch["id"])
            await until_status(client, batch, "completed")
        listed = [batch["id"] for batch in (await client.get("/v1/batches")).json()["data"]]
        assert listed == ids[:1:-1]
        assert (await client.get(f"/v1/batches/{ids[0]}")).status_code == 404


async def test_who_has_no_room_for_results_makes_no_batch() -> None:
    async with batching(says("x"), file_quota_count=1) as own:
        client = own.router.client
        body = {"endpoint": TEXT, "completion_window": "24h"}
        body["input_file_id"] = await upload(client, jsonl([line(1)]))
        reply = await client.post("/v1/batches", json=body)
        assert reply.status_code == 403 and reply.json()["error"]["code"] == "file_quota_exceeded"
