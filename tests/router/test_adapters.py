"""Adapters by name: loaded and unloaded by administrators, listed, asked for, and gone."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
from msgspec.structs import replace

from headrace_router.adapters import AdapterTable
from headrace_shared.adapter_records import StoredAdapter, find_adapter, store_adapter, stored_adapter
from headrace_shared.bus import Entry
from headrace_shared.codec import encode
from headrace_shared.fleet_messages import AdapterRecord, Hello, LoadedAdapter, WorkerState
from headrace_shared.messages import WorkerId
from headrace_shared.subjects import ADAPTERS, adapter_key
from tests.byte_model import MODEL
from tests.router.keys import add_key
from tests.router.support import Router, running_router, says

POET = AdapterRecord(name="poet", model=MODEL, path="poet", digest="d1", created=1)


class Loader:
    """Answers for the workers: what is on record is loaded, unless its folder is bad."""

    def __init__(self, router: Router, problem: str = "") -> None:
        self._router = router
        self._problem = problem

    def on_change(self, entry: Entry | None, key: str) -> None:
        worker = self._router.worker
        others = tuple(said for said in worker.adapters if adapter_key(said.name) != key)
        worker.adapters = others
        if entry is not None:
            record, revision = stored_adapter(entry)
            digest = "" if self._problem else "digest of " + record.path
            worker.adapters = (*others, LoadedAdapter(record.name, digest, self._problem, revision))


@contextlib.asynccontextmanager
async def loading_router(problem: str = "") -> AsyncIterator[tuple[Router, dict[str, str]]]:
    """And an administrator's headers."""
    async with running_router(says("hello")) as router:
        await router.worker.bus.ensure_bucket(ADAPTERS)
        await router.worker.bus.watch(ADAPTERS.name, Loader(router, problem).on_change)
        admin = await add_key(router.bus, is_admin=True)
        await until_status(200, lambda: router.client.get("/v1/models", headers=admin))
        await until_status(200, lambda: router.client.get("/health"))
        yield router, admin


async def until_status(status: int, call: Callable[[], Awaitable[httpx.Response]]) -> httpx.Response:
    async with asyncio.timeout(10.0):
        while True:
            reply = await call()
            if reply.status_code == status:
                return reply
            await asyncio.sleep(0.01)


async def load(router: Router, headers: dict[str, str], **fields: Any) -> httpx.Response:
    body = {"lora_name": "poet", "lora_path": "poets/first"} | fields
    return await router.client.post("/v1/load_lora_adapter", json=body, headers=headers)


async def complete(router: Router, model: str) -> httpx.Response:
    return await router.client.post("/v1/completions", json={"model": model, "prompt": "hi", "max_tokens": 3})


async def test_an_adapter_is_loaded_listed_asked_for_and_unloaded() -> None:
    async with loading_router() as (router, admin):
        reply = await load(router, admin)
        assert reply.status_code == 200 and "poet" in reply.text, reply.text
        listed = (await router.client.get("/v1/models")).json()["data"]
        assert [(model["id"], model["parent"], model["root"]) for model in listed] == [
            (MODEL, None, MODEL),
            ("poet", MODEL, MODEL),
        ]
        assert (await router.client.get("/v1/models/poet")).json()["parent"] == MODEL
        reply = await complete(router, "poet")
        assert reply.status_code == 200 and reply.json()["model"] == "poet"
        assert reply.headers["headrace-model"] == "poet"
        request = router.worker.requests[-1]
        assert (request.model, request.adapter, request.adapter_digest) == (MODEL, "poet", "digest of poets/first")
        assert (await complete(router, MODEL)).json()["model"] == MODEL
        assert router.worker.requests[-1].adapter_digest == ""

        reply = await load(router, admin)
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, "name_taken")
        reply = await router.client.post("/v1/unload_lora_adapter", json={"lora_name": "poet"}, headers=admin)
        assert reply.status_code == 200
        reply = await until_status(404, lambda: complete(router, "poet"))
        assert reply.json()["error"]["code"] == "model_not_found"
        reply = await router.client.post("/v1/unload_lora_adapter", json={"lora_name": "poet"}, headers=admin)
        assert reply.status_code == 404


async def test_what_no_worker_can_load_is_told_and_leaves_no_trace() -> None:
    async with loading_router(problem="its rank 999 exceeds 64") as (router, admin):
        reply = await load(router, admin)
        assert reply.status_code == 400
        error = reply.json()["error"]
        assert (error["code"], error["param"]) == ("adapter_refused", "lora_path")
        assert "rank 999" in error["message"]
        assert await router.bus.entries(ADAPTERS.name) == []
        assert (await complete(router, "poet")).status_code == 404


async def test_a_load_that_a_router_did_not_live_to_finish_blocks_no_name() -> None:
    async with loading_router() as (router, admin):
        now = int(time.time())
        await store_adapter(router.bus, replace(POET, digest="", created=now), None)
        reply = await load(router, admin)
        assert reply.json()["error"]["code"] == "name_taken", "somebody else may be loading it"
        stored = await find_adapter(router.bus, "poet")
        await store_adapter(router.bus, replace(POET, digest="", created=now - 1000), stored)
        reply = await load(router, admin)
        assert reply.status_code == 200, reply.text
        stored = await find_adapter(router.bus, "poet")
        assert stored is not None
        assert (stored.record.path, stored.record.digest) == ("poets/first", "digest of poets/first")
        assert (await complete(router, "poet")).status_code == 200


async def test_only_administrators_may() -> None:
    async with loading_router() as (router, _):
        others = [{}, {"Authorization": "Bearer something"}, await add_key(router.bus, name="other")]
        for headers in others:
            await asyncio.sleep(0.05)
            assert (await load(router, headers)).status_code == 403
            reply = await router.client.post("/v1/unload_lora_adapter", json={"lora_name": "poet"}, headers=headers)
            assert (reply.status_code, reply.json()["error"]["code"]) == (403, "admin_key_required")
        assert await router.bus.entries(ADAPTERS.name) == []


BAD: list[tuple[dict[str, Any], int, str]] = [
    ({"lora_name": ""}, 400, "lora_name"),
    ({"lora_name": "../x"}, 400, "lora_name"),
    ({"lora_name": "a b"}, 400, "lora_name"),
    ({"lora_name": "x" * 129}, 400, "lora_name"),
    ({"lora_name": MODEL}, 400, "lora_name"),
    ({"lora_path": ""}, 400, "lora_path"),
    ({"lora_path": "x" * 1025}, 400, "lora_path"),
    ({"lora_path": 3}, 400, "lora_path"),
    ({"load_inplace": True}, 400, "load_inplace"),
    ({"base_model": "other"}, 404, "model"),
]


async def test_bad_fields_are_named() -> None:
    async with loading_router() as (router, admin):
        for fields, status, param in BAD:
            reply = await load(router, admin, **fields)
            assert (reply.status_code, reply.json()["error"]["param"]) == (status, param), reply.text
        assert await router.bus.entries(ADAPTERS.name) == []


async def test_without_a_worker_nothing_is_loaded() -> None:
    async with running_router(says("hello"), has_worker=False) as router:
        admin = await add_key(router.bus, is_admin=True)
        reply = await until_status(503, lambda: load(router, admin))
        assert reply.json()["error"]["code"] == "no_worker"


async def test_a_key_for_some_models_needs_the_adapter_by_its_own_name() -> None:
    async with loading_router() as (router, admin):
        await load(router, admin)
        key = await add_key(router.bus, name="narrow", models=(MODEL,))
        await asyncio.sleep(0.05)
        body = {"model": "poet", "prompt": "hi", "max_tokens": 3}
        reply = await router.client.post("/v1/completions", json=body, headers=key)
        assert (reply.status_code, reply.json()["error"]["code"]) == (403, "model_not_allowed")
        listed = (await router.client.get("/v1/models", headers=key)).json()["data"]
        assert [model["id"] for model in listed] == [MODEL]


async def test_records_outlive_routers_and_workers() -> None:
    async with running_router(says("hello")) as router:
        await store_adapter(router.bus, POET, None)
        await until_status(200, lambda: router.client.get("/v1/models/poet"))
        router.worker.is_taking = False
        asked = asyncio.create_task(complete(router, "poet"))
        await asyncio.sleep(0.1)
        router.worker.is_taking = True
        assert (await asked).status_code == 200
        assert router.worker.requests[-1].adapter_digest == "d1"


def hello(worker: str, *adapters: LoadedAdapter, state: WorkerState = WorkerState.READY) -> Hello:
    return Hello(
        worker=WorkerId(worker),
        model=MODEL,
        state=state,
        epoch=1,
        num_blocks=1,
        block_size=16,
        context=1,
        max_sequences=1,
        tokens_per_iteration=1,
        adapters=adapters,
    )


def test_answers_count_ready_workers_that_have_dealt_with_the_record() -> None:
    table = AdapterTable()
    stored = StoredAdapter(POET, 7)
    assert not table.answers(stored, 0.0).num_workers
    table.on_hello(hello("a"), 0.0)
    table.on_hello(hello("b", LoadedAdapter("poet", "d0", "", 6)), 0.0)
    table.on_hello(hello("c", LoadedAdapter("poet", "d1", "", 7), state=WorkerState.LOADING), 0.0)
    answers = table.answers(stored, 1.0)
    assert (answers.num_workers, answers.loaded, answers.problems) == (2, [], [])
    table.on_hello(hello("a", LoadedAdapter("poet", "d1", "", 7)), 1.0)
    table.on_hello(hello("b", LoadedAdapter("poet", "", "too large", 8)), 1.0)
    answers = table.answers(stored, 1.0)
    assert answers.is_complete and (answers.loaded, answers.problems) == (["d1"], ["too large"])
    table.on_hello(hello("b", state=WorkerState.LEAVING), 1.0)
    assert table.answers(stored, 3.0).num_workers == 1
    assert table.answers(stored, 9.0).num_workers == 0


def test_records_that_are_none_or_not_their_own_are_not_served() -> None:
    table = AdapterTable()
    table.on_change(Entry("poet", b"\xff", 1), "poet")
    table.on_change(Entry("other", encode(POET), 2), "other")
    assert table.all() == [] and table.find("poet") is None
    pending = AdapterRecord(name="poet", model=MODEL, path="p")
    table.on_change(Entry("poet", encode(pending), 3), "poet")
    assert table.find("poet") is None and table.num_of(MODEL) == 1
    table.on_change(Entry("poet", encode(POET), 4), "poet")
    assert table.find("poet") == POET
    table.on_change(None, "poet")
    assert table.find("poet") is None
