"""What nobody reads any more gets an end."""

import asyncio
import time

import msgspec
import pytest

from headrace_router.responses_api import background
from headrace_router.responses_api.background import BackgroundResponses
from headrace_router.responses_api.store import Found, ResponseStore
from headrace_router.responses_api.stored import StoredResponse, Unfinished, pack
from headrace_router.settings import RouterSettings
from headrace_shared.bus import Bus
from headrace_shared.codec import encode
from headrace_shared.messages import FinishReason, RequestId, TokenFrame
from headrace_shared.subjects import UNFINISHED, tokens_subject
from tests.byte_model import byte_ids
from tests.router.responses_api.call_records import REQUEST_ID, record
from tests.router.responses_api.client import create, in_steps, retrieve, text_of
from tests.router.resumable import two_routers
from tests.router.support import running_router, says, until

STORED = StoredResponse(owner="o", response=pack({"id": f"resp_{REQUEST_ID}", "status": "queued"}), items=pack([]))
NOBODY = ""


async def until_gone(bus: Bus) -> None:
    for _ in range(3000):
        if not await bus.entries(UNFINISHED.name):
            return
        await asyncio.sleep(0.02)
    raise AssertionError("still unfinished")


async def test_an_answer_that_was_lost_failed() -> None:
    async with running_router(says("ok")) as router:
        store = ResponseStore(router.bus)
        call = msgspec.structs.replace(record(), created=int(time.time()) - 10_000)
        await store.create(REQUEST_ID, msgspec.structs.replace(STORED, call=call))
        await store.add_unfinished(REQUEST_ID, NOBODY)
        await until_gone(router.bus)
        found = await store.find(REQUEST_ID)
        assert found is not None and found.stored.object["status"] == "failed"
        assert found.stored.object["error"]["message"] == "The answer was lost."


async def test_an_answer_that_cannot_be_found_failed() -> None:
    """It was queued by a router that is gone, and neither queue nor log know of it."""
    async with running_router(says("ok")) as router:
        store = ResponseStore(router.bus)
        recent = msgspec.structs.replace(record(), created=int(time.time()))
        request = msgspec.structs.replace(recent.requests[0], model="tiny", timeout_s=600.0)
        await store.create(
            REQUEST_ID, msgspec.structs.replace(STORED, call=msgspec.structs.replace(recent, requests=(request,)))
        )
        await store.add_unfinished(REQUEST_ID, NOBODY)
        await until_gone(router.bus)
        found = await store.find(REQUEST_ID)
        assert found is not None and found.stored.object["status"] == "failed"


async def test_a_clock_that_is_ahead_loses_no_answer() -> None:
    """Of the router that takes over, or of the one that queued it, backwards: the log says what there is."""
    async with running_router(says("ok")) as router:
        store = ResponseStore(router.bus)
        old = msgspec.structs.replace(record(), created=int(time.time()) - 10_000)
        request = msgspec.structs.replace(old.requests[0], model="tiny", timeout_s=600.0)
        frame = TokenFrame(
            request_id=REQUEST_ID, choice=0, attempt=0, index=0, tokens=(byte_ids("x")[0],), finish=FinishReason.LENGTH
        )
        router.bus.publish(tokens_subject(request.router, REQUEST_ID), encode(frame))
        await store.create(
            REQUEST_ID, msgspec.structs.replace(STORED, call=msgspec.structs.replace(old, requests=(request,)))
        )
        await store.add_unfinished(REQUEST_ID, NOBODY)
        await until_gone(router.bus)
        found = await store.find(REQUEST_ID)
        assert found is not None and text_of(found.stored.object) == "x"


async def test_what_is_on_the_list_and_nowhere_else_is_taken_off() -> None:
    async with running_router(says("ok")) as router:
        await ResponseStore(router.bus).add_unfinished(RequestId("2" * 32), NOBODY)
        await until_gone(router.bus)


async def test_a_router_that_is_full_says_nothing_of_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "RETRY_S", 0.1)
    monkeypatch.setattr(background, "PERIOD_S", 0.05)
    gate = asyncio.Event()
    settings = RouterSettings(port=0, drain_delay_s=0.0, drain_timeout_s=5.0, max_inflight=1)
    async with running_router(in_steps("the tin", gate), settings=settings) as router:
        busy = asyncio.create_task(create(router.client, "Hi"))
        await until(lambda: bool(router.worker.requests))
        store = ResponseStore(router.bus)
        recent = msgspec.structs.replace(record(), created=int(time.time()))
        request = msgspec.structs.replace(recent.requests[0], model="tiny", timeout_s=600.0)
        frame = TokenFrame(
            request_id=REQUEST_ID, choice=0, attempt=0, index=0, tokens=(byte_ids("x")[0],), finish=FinishReason.LENGTH
        )
        router.bus.publish(tokens_subject(request.router, REQUEST_ID), encode(frame))
        await store.create(
            REQUEST_ID, msgspec.structs.replace(STORED, call=msgspec.structs.replace(recent, requests=(request,)))
        )
        await store.add_unfinished(REQUEST_ID, NOBODY)
        await asyncio.sleep(0.5)
        found = await store.find(REQUEST_ID)
        assert found is not None and found.stored.object["status"] == "queued"
        gate.set()
        await busy
        await until_gone(router.bus)
        found = await store.find(REQUEST_ID)
        assert found is not None and text_of(found.stored.object) == "x"


async def test_what_the_broker_does_not_know_yet_is_looked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    found = ResponseStore.find
    looks = []

    async def late(self: ResponseStore, request_id: RequestId) -> Found | None:
        looks.append(request_id)
        return None if len(looks) == 1 else await found(self, request_id)

    async with running_router(says("ok")) as router:
        store = ResponseStore(router.bus)
        call = msgspec.structs.replace(record(), created=int(time.time()) - 10_000)
        await store.create(REQUEST_ID, msgspec.structs.replace(STORED, call=call))
        monkeypatch.setattr(ResponseStore, "find", late)
        await store.add_unfinished(REQUEST_ID, NOBODY)
        await until_gone(router.bus)
        ended = await found(store, REQUEST_ID)
        assert ended is not None and ended.stored.object["status"] == "failed"


async def test_whoever_repeats_a_call_reads_its_response_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "PERIOD_S", 0.05)
    adopted = []

    async def adopt(self: BackgroundResponses, request_id: RequestId, unfinished: Unfinished) -> None:
        adopted.append(request_id)

    monkeypatch.setattr(BackgroundResponses, "_adopt", adopt)
    gate = asyncio.Event()
    async with two_routers(in_steps("the tin", gate)) as routers:
        headers = {"Idempotency-Key": "k"}
        asked = {"model": "tiny", "input": "Hi", "background": True}
        for client in (routers.a.client, routers.b.client, routers.b.client):
            reply = await client.post("/v1/responses", json=asked, headers=headers)
            assert reply.status_code == 200
        await asyncio.sleep(0.5)
        gate.set()
        ended = await retrieve(routers.b.client, reply.json()["id"], "completed")
        assert text_of(ended) == "the tin" and adopted == []
