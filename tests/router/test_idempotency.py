"""The same key and body is the same answer, however often and wherever it is asked for."""

import asyncio
import contextlib
import json
from typing import Any

import httpx
import pytest

from headrace_router import call_store
from headrace_router.call_store import CallStore, IdempotencyKey
from headrace_router.identity import anonymous
from headrace_router.settings import RouterSettings
from headrace_shared.errors import QueueFull
from headrace_shared.memory_bus import MemoryBroker, MemoryBus
from headrace_shared.messages import Outcome, Request, RequestId
from headrace_shared.subjects import CALLS, IDEMPOTENCY, TOKENS
from tests.router.resumable import CHAT, HELD_ID, RESUMABLE, TEXT, body, events_of, two_routers
from tests.router.scripts import endless
from tests.router.support import Router, ScriptedWorker, running_router, says, until

KEY = {"Idempotency-Key": "order 7"}


async def whole(router: Router, headers: dict[str, str] = KEY, **fields: Any) -> httpx.Response:
    return await router.client.post(TEXT, json=body(TEXT, stream=False, temperature=1.0, **fields), headers=headers)


async def test_a_repeated_call_gets_the_first_ones_answer() -> None:
    async with two_routers(says("abc")) as routers:
        first = await whole(routers.a)
        again = await whole(routers.b)
        assert again.json() == first.json() and again.headers[HELD_ID] == first.headers[HELD_ID]
        assert len(routers.a.worker.requests) == 1
        stream = {"Idempotency-Key": "other"} | RESUMABLE
        one = await routers.a.client.post(CHAT, json=body(CHAT), headers=stream)
        two = await routers.b.client.post(CHAT, json=body(CHAT), headers=stream)
        rest = {"Last-Event-ID": events_of(one.text)[1].id or ""}
        three = await routers.b.client.post(CHAT, json=body(CHAT), headers=stream | rest)
        assert events_of(one.text) == events_of(two.text)
        assert events_of(three.text) == events_of(one.text)[2:]
        assert len(routers.a.worker.requests) == 2


async def test_simultaneous_calls_are_one() -> None:
    async with two_routers(says("abc", pause_s=0.05)) as routers:
        replies = await asyncio.gather(*(whole((routers.a, routers.b)[number % 2]) for number in range(10)))
        assert {reply.status_code for reply in replies} == {200}
        assert len({json.dumps(reply.json()) for reply in replies}) == 1
        assert len(routers.a.worker.requests) == 1


async def test_a_key_is_its_callers_and_bodys_own() -> None:
    async with two_routers(says("abc")) as routers:
        first = (await whole(routers.a)).json()["id"]
        other = await whole(routers.b, max_tokens=5)
        assert other.status_code == 422
        error = other.json()["error"]
        assert (error["param"], error["code"]) == ("Idempotency-Key", "idempotency_key_reused")
        chat = await routers.b.client.post(CHAT, json=body(CHAT), headers=KEY)
        assert chat.status_code == 422
        assert (await whole(routers.b, KEY | {"Authorization": "Bearer x"})).json()["id"] != first
        assert (await whole(routers.b, {"Idempotency-Key": "order 8"})).json()["id"] != first


async def test_a_key_that_cannot_be_read_is_no_fault_of_the_client() -> None:
    async with two_routers(says("abc")) as routers:
        key = IdempotencyKey(anonymous("").owner, KEY["Idempotency-Key"], b"")
        await routers.b.bus.put(IDEMPOTENCY.name, key.bucket_key, b"\xc1")
        refused = await whole(routers.a)
        assert (refused.status_code, refused.json()["error"]["code"]) == (500, "idempotency_key_unreadable")
        assert not routers.a.worker.requests


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.CANCELLED, Outcome.EXPIRED])
async def test_a_failure_is_no_answer_to_repeat(outcome: Outcome) -> None:
    async def script(worker: ScriptedWorker, request: Request) -> None:
        if len(worker.requests) == 1:
            await worker.end(request, outcome, "internal_error", "Not this time.")
        else:
            await says("abc")(worker, request)

    async with two_routers(script) as routers:
        assert (await whole(routers.a)).status_code >= 400
        again = await whole(routers.b)
        assert again.json()["choices"][0]["text"] == "abc"
        assert (await whole(routers.a)).json() == again.json()
        assert len(routers.a.worker.requests) == 2


async def test_what_was_refused_frees_its_key() -> None:
    class FullBus(MemoryBus):
        is_full = True

        async def enqueue(self, subject: str, data: bytes, *, message_id: str, headers: Any = None) -> int:
            if self.is_full and subject.startswith("requests."):
                raise QueueFull("full")
            return await super().enqueue(subject, data, message_id=message_id, headers=headers)

    broker = MemoryBroker()
    bus = FullBus(broker)
    async with running_router(says("abc"), buses=(bus, MemoryBus(broker))) as router:
        assert (await whole(router)).status_code == 429
        bus.is_full = False
        assert (await whole(router)).status_code == 200
        assert not router.worker.cancels


async def test_a_router_that_died_before_it_could_record_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the queue had the request, or after: it runs once."""
    async with two_routers(says("abc", pause_s=0.1)) as routers:
        for is_queued in (False, True):
            headers = {"Idempotency-Key": f"key {is_queued}"}
            save = CallStore.save

            async def die(*_: Any) -> None:
                raise asyncio.CancelledError

            with monkeypatch.context() as patch:
                patch.setattr(CallStore, "save", die) if is_queued else patch.setattr(
                    "headrace_router.generation.submit", die
                )
                with contextlib.suppress(httpx.HTTPError):
                    await whole(routers.a, headers)
            assert CallStore.save is save
            answer = await whole(routers.b, headers)
            assert answer.json()["choices"][0]["text"] == "abc"
        assert len(routers.a.worker.requests) == 2


@pytest.mark.parametrize("outcome", [None, Outcome.CANCELLED, Outcome.FINISHED])
async def test_a_client_that_comes_back_late_to_a_call_without_a_record(
    monkeypatch: pytest.MonkeyPatch, outcome: Outcome | None
) -> None:
    """As after a long outage. What was never queued, or ended because nobody waited, begins anew; what has run does not
    run again."""

    async def script(worker: ScriptedWorker, request: Request) -> None:
        if outcome is Outcome.CANCELLED and len(worker.requests) == 1:
            await worker.end(request, outcome)
        else:
            await says("abc")(worker, request)

    async def die(*_: Any) -> None:
        raise asyncio.CancelledError

    monkeypatch.setattr(call_store, "SAFE_DEDUPE_S", 0.0)
    async with two_routers(script) as routers:
        worker = routers.a.worker
        with monkeypatch.context() as patch:
            if outcome is None:
                patch.setattr("headrace_router.generation.submit", die)
            else:
                patch.setattr(CallStore, "save", die)
            with contextlib.suppress(httpx.HTTPError):
                await whole(routers.a)
        if outcome is not None:
            await until(lambda: bool(worker.requests) and not routers.a.broker.streams["REQUESTS"].stored)
        late = await whole(routers.b)
        if outcome is Outcome.FINISHED:
            assert (late.status_code, late.json()["error"]["code"]) == (410, "answer_expired")
            assert len(worker.requests) == 1
            return
        assert late.json()["choices"][0]["text"] == "abc"
        assert len(worker.requests) == (1 if outcome is None else 2)
        assert (await whole(routers.a)).json() == late.json()
        monkeypatch.setattr(call_store, "SURE_LOG_S", 0.0)
        await routers.a.bus.remove(CALLS.name, late.headers[HELD_ID])
        assert (await whole(routers.b)).status_code == 410, "nobody knows any more whether it ran"


async def test_an_answer_that_is_not_kept_any_more() -> None:
    async with two_routers(says("abc")) as routers:
        first = await whole(routers.a)
        await until(lambda: not routers.a.broker.streams["REQUESTS"].stored)
        routers.a.broker.streams[TOKENS.name].stored.clear()
        again = await whole(routers.b)
        assert (again.status_code, again.json()["error"]["code"]) == (410, "answer_expired")
        assert await CallStore(routers.a.bus).load(RequestId(first.headers[HELD_ID])) is not None
        await routers.a.bus.remove(CALLS.name, first.headers[HELD_ID])


async def test_a_client_that_comes_back_with_its_key_in_time() -> None:
    async with two_routers(endless, reattach_timeout_s=1.0) as routers:
        with pytest.raises(httpx.ReadTimeout):
            await routers.a.client.post(TEXT, json=body(TEXT, stream=False), headers=KEY, timeout=0.3)
        await asyncio.sleep(0.4)
        with pytest.raises(httpx.ReadTimeout):
            await routers.b.client.post(TEXT, json=body(TEXT, stream=False), headers=KEY, timeout=1.5)
        assert len(routers.a.worker.requests) == 1 and not routers.a.worker.cancels
        await until(lambda: bool(routers.a.worker.cancels), 8.0)


async def test_others_take_the_key_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nobody(*_: Any) -> None:
        return None

    async with running_router(says("abc"), settings=RouterSettings(port=0, drain_delay_s=0.0)) as router:
        monkeypatch.setattr(CallStore, "claim", nobody)
        refused = await whole(router)
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "idempotency_key_busy")
        key = IdempotencyKey(anonymous("").owner, "order 7", b"")
        assert await CallStore(router.bus).find(key) is None
