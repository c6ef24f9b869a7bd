"""Who gets in, who sees what, and what the routers agree on about it."""

import asyncio
from typing import Any

import httpx
import pytest
from starlette.routing import Route

from headrace_router.accounts import Accounts
from headrace_router.identity import anonymous, known
from headrace_router.presence import Presence
from headrace_router.routes import make_router
from headrace_router.settings import RouterSettings
from headrace_shared.api_keys import ApiKey, Priority, new_key
from headrace_shared.errors import LimitReached
from headrace_shared.memory_bus import MemoryBroker, MemoryBus
from headrace_shared.messages import Lane
from headrace_shared.subjects import KEYS, REQUESTS, Queue
from tests.byte_model import MODEL
from tests.router.keys import add_key, strict_router, until_known
from tests.router.resumable import CHAT, HELD_ID, TEXT, body, two_routers
from tests.router.scripts import endless
from tests.router.support import Router, running_router, says, until


async def ask(router: Router, headers: dict[str, str], **fields: Any) -> httpx.Response:
    return await router.client.post(TEXT, json=body(TEXT, stream=False, **fields), headers=headers)


async def test_everything_is_closed_but_what_is_named() -> None:
    async with strict_router(says("abc")) as router:
        paths = [
            "/v1/models",
            "/v1/chat/completions",
            "/metrics",
            "/version",
            "/openapi.json",
            "/nowhere",
            "/dashboard/api/live",
            "/dashboardx",
        ]
        paths += ["/%2Fhealth", "/health/", "/live/../v1/models", "/%68ealth/x", "/HEALTH", "/v1/requests/" + "0" * 32]
        for path in paths:
            for method in ("GET", "POST", "OPTIONS", "HEAD"):
                reply = await router.client.request(method, path)
                assert reply.status_code == 401, (method, path)
                assert reply.headers["www-authenticate"] == "Bearer"
        error = (await router.client.get("/v1/models")).json()["error"]
        assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
        for path in ("/health", "/live"):
            assert (await router.client.get(path)).status_code in (200, 503)


async def test_no_route_of_the_application_is_forgotten() -> None:
    async with strict_router(says("abc")) as router:
        routes = [route.path for route in make_router(None).routes if isinstance(route, Route)]  # type: ignore[arg-type]  # never called
        assert len(routes) > 8
        for path in routes:
            reply = await router.client.get(path.replace("{request_id}", "x").replace("{name:path}", "x"))
            assert (reply.status_code == 401) is (path not in ("/health", "/live")), path


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer none"},
        {"Authorization": "Bearer hr-000000000000-" + "A" * 43},
        {"Authorization": "Bearer"},
        {"Authorization": "Basic abc"},
        {"Authorization": "Bearer hr-" + "0" * 10_000},
        {"x-api-key": "none"},
    ],
)
async def test_what_is_no_key_is_told_nothing(headers: dict[str, str]) -> None:
    async with strict_router(says("abc")) as router:
        assert (await ask(router, headers)).status_code == 401
        assert not router.worker.requests


async def test_a_key_opens_and_a_revoked_one_does_not() -> None:
    async with strict_router(says("abc"), open_metrics=True) as router:
        headers = await add_key(router.bus)
        await until_known(router, headers)
        assert (await ask(router, headers)).status_code == 200
        key = headers["Authorization"].removeprefix("Bearer ")
        assert (await ask(router, {"x-api-key": key})).status_code == 200
        wrong = key[:-1] + ("a" if key[-1] != "a" else "b")
        assert (await ask(router, {"Authorization": f"Bearer {wrong}"})).status_code == 401
        metrics = (await router.client.get("/metrics")).text
        assert 'code="invalid_api_key"' in metrics and key not in metrics
        (entry,) = await router.bus.entries(KEYS.name)
        await router.bus.remove(KEYS.name, entry.key)
        await asyncio.sleep(0.5)  # on every router within a second
        assert (await ask(router, headers)).status_code == 401


async def test_without_a_need_for_keys_a_revoked_one_is_still_refused() -> None:
    async with running_router(says("abc")) as router:
        assert (await ask(router, {"Authorization": "Bearer none"})).status_code == 200
        assert (await ask(router, {"Authorization": f"Bearer {new_key().text}"})).status_code == 401


async def test_requests_carry_their_tenant_class_and_salt_into_its_own_queue() -> None:
    async with running_router(says("abc")) as router:
        headers = await add_key(router.bus, flow=3, weight=2.5, priority=Priority.HIGH)
        await until_known(router, headers)
        assert (await ask(router, headers, cache_salt="own")).status_code == 200
        waiting = asyncio.create_task(ask(router, headers | {"Headrace-Lane": "batch"}))
        queued = Queue(MODEL, Lane.BATCH, 3).subject
        for _ in range(6000):
            if await router.bus.read(REQUESTS, queued, 2):
                break
            await asyncio.sleep(0.01)
        assert await router.bus.read(REQUESTS, queued, 2)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert (await ask(router, {}, cache_salt="own")).status_code == 200
        first, last = router.worker.requests
        assert (first.tenant, first.weight, first.priority) == ("acme", 2.5, 1)
        assert first.cache_salt == "\0acme\0own" and last.cache_salt == "own" and last.tenant == ""


async def test_a_key_of_the_batch_lane_stays_in_it() -> None:
    identity = known(ApiKey(key_id="k", secret_hash=b"", name="n", tenant="t", flow=1, created=0, lane=Lane.BATCH))
    assert identity.lane(Lane.INTERACTIVE) is Lane.BATCH
    assert anonymous("").lane(Lane.INTERACTIVE) is Lane.INTERACTIVE


async def test_models_that_a_key_may_not_use() -> None:
    async with running_router(says("abc")) as router:
        headers = await add_key(router.bus, models=("other",))
        await until_known(router, headers, sees_model=False)
        refused = await ask(router, headers)
        assert refused.status_code == 403
        error = refused.json()["error"]
        assert (error["type"], error["code"], error["param"]) == ("permission_error", "model_not_allowed", "model")
        assert (await router.client.get("/v1/models", headers=headers)).json()["data"] == []
        assert (await router.client.get(f"/v1/models/{MODEL}", headers=headers)).status_code == 403
        asked = {"model": MODEL, "prompt": "x"}
        assert (await router.client.post("/tokenize", json=asked, headers=headers)).status_code == 403
        assert not router.worker.requests


async def test_limits_are_told_and_kept() -> None:
    async with running_router(says("abc")) as router:
        headers = await add_key(router.bus, requests_per_minute=2, tokens_per_minute=1000)
        await until_known(router, headers)
        first, second, third = [await ask(router, headers) for _ in range(3)]
        assert [first.status_code, second.status_code, third.status_code] == [200, 200, 429]
        left = [int(reply.headers["x-ratelimit-remaining-requests"]) for reply in (first, second, third)]
        assert left == [1, 0, 0] and first.headers["x-ratelimit-limit-requests"] == "2"
        assert third.json()["error"]["code"] == "rate_limit_exceeded"
        assert 25 <= int(third.headers["retry-after"]) <= 30
        assert int(third.headers["x-ratelimit-remaining-tokens"]) > 900, "unused estimates come back"
        huge = await ask(router, headers, max_tokens=200, n=8)
        assert huge.status_code == 429 and huge.json()["error"]["code"] == "request_exceeds_limit"
        assert huge.headers["x-should-retry"] == "false"


async def test_every_answer_to_every_prompt_counts_as_a_request() -> None:
    async with running_router(says("abc")) as router:
        headers = await add_key(router.bus, requests_per_minute=12, max_concurrent=6)
        await until_known(router, headers)

        async def asked(left: int, **fields: Any) -> tuple[int, str]:
            """A request comes back every five seconds."""
            reply = await ask(router, headers, **fields)
            assert left <= int(reply.headers["x-ratelimit-remaining-requests"]) <= left + 1, fields
            return reply.status_code, "" if reply.status_code == 200 else reply.json()["error"]["code"]

        assert await asked(6, prompt=["a", "b"], n=3) == (200, "")
        assert await asked(6, n=7) == (429, "request_exceeds_limit")
        assert await asked(6, prompt=["a"] * 13) == (429, "request_exceeds_limit")
        assert await asked(2, n=4) == (200, "")
        assert await asked(2, n=6) == (429, "rate_limit_exceeded")
        assert await asked(1, n=2, temperature=-1.0) == (400, "invalid_value")
        assert await asked(0) == (200, ""), "of what was not valid all but one request came back"


async def test_a_call_that_is_tried_in_several_forms_counts_once() -> None:
    """Whoever asks the Messages API for more than there is room for gets what there is; a conversation that does not
    fit is shortened where that is wanted."""
    said = [{"role": "user", "content": "x" * 100}, {"role": "assistant", "content": "y" * 100}]
    long = [*said * 3, {"role": "user", "content": "Hi"}]
    asked: tuple[tuple[str, dict[str, Any], int], ...] = (
        ("/v1/messages", {"messages": said[:1], "max_tokens": 100_000}, 200),
        ("/v1/responses", {"input": long, "truncation": "auto", "store": False}, 200),
        ("/v1/responses", {"input": long, "store": False}, 400),
    )
    async with running_router(says("abc")) as router:
        for path, fields, status in asked:
            headers = await add_key(router.bus, requests_per_minute=10)
            await until_known(router, headers)
            reply = await router.client.post(path, json={"model": MODEL, **fields}, headers=headers)
            assert reply.status_code == status, reply.text
            left = (await router.client.get("/v1/models", headers=headers)).headers["x-ratelimit-remaining-requests"]
            assert left in ("9", "10"), (path, left)


async def test_every_answer_that_is_running_has_a_place() -> None:
    async with running_router(endless) as router:
        headers = await add_key(router.bus, max_concurrent=5)
        await until_known(router, headers)
        first = asyncio.create_task(ask(router, headers, n=3))
        await until(lambda: len(router.worker.requests) == 1)
        assert "at once" in (await ask(router, headers, n=3)).json()["error"]["message"]
        second = asyncio.create_task(ask(router, headers, prompt=["a", "b"]))
        await until(lambda: len(router.worker.requests) == 3)
        assert (await ask(router, headers)).status_code == 429
        for task in (first, second):
            task.cancel()
        await asyncio.gather(first, second, return_exceptions=True)
        async with asyncio.timeout(5.0):
            while True:
                last = asyncio.create_task(ask(router, headers, n=5))
                await asyncio.wait({last}, timeout=0.2)
                if not last.done():
                    break
        last.cancel()
        await asyncio.gather(last, return_exceptions=True)


QUESTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/tokenize", {"prompt": "x"}),
    ("/detokenize", {"tokens": [1]}),
    ("/v1/completions/render", {"prompt": "x"}),
    ("/v1/chat/completions/render", {"messages": [{"role": "user", "content": "x"}]}),
    ("/v1/responses/input_tokens", {"input": "x"}),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "x"}]}),
)


async def test_questions_about_prompts_are_requests_too() -> None:
    async with running_router(says("abc")) as router:
        for path, fields in QUESTIONS:
            headers = await add_key(router.bus, requests_per_minute=1)
            await until_known(router, headers)
            asked = {"model": MODEL, **fields}
            told = [(await router.client.post(path, json=asked, headers=headers)).status_code for _ in range(2)]
            assert told == [200, 429], path


async def test_a_full_router_answers_no_questions() -> None:
    settings = RouterSettings(port=0, drain_delay_s=0.0, drain_timeout_s=5.0, max_inflight=1)
    async with running_router(endless, settings=settings) as router:
        running = asyncio.create_task(ask(router, {}))
        await until(lambda: bool(router.worker.requests))
        for path, fields in QUESTIONS:
            assert (await router.client.post(path, json={"model": MODEL, **fields})).status_code in (429, 529), path
        running.cancel()


async def test_at_most_so_many_at_once() -> None:
    async with running_router(endless) as router:
        headers = await add_key(router.bus, max_concurrent=2)
        await until_known(router, headers)
        running = [asyncio.create_task(ask(router, headers)) for _ in range(2)]
        await until(lambda: len(router.worker.requests) == 2)
        refused = await ask(router, headers)
        assert refused.status_code == 429 and "at once" in refused.json()["error"]["message"]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await until(lambda: len(router.worker.cancels) == 2)
        async with asyncio.timeout(5.0):
            while True:
                last = asyncio.create_task(ask(router, headers))
                await asyncio.sleep(0.1)
                if not last.done():
                    last.cancel()
                    break


async def test_a_tenant_neither_sees_nor_ends_what_is_anothers() -> None:
    async with two_routers(endless) as routers:
        own = await add_key(routers.a.bus, name="a", tenant="a")
        other = await add_key(routers.a.bus, name="b", tenant="b", flow=2)
        colleague = await add_key(routers.a.bus, name="c", tenant="a")
        for headers in (own, other, colleague):
            for router in (routers.a, routers.b):
                await until_known(router, headers)
        call = {"Headrace-Resumable": "true", "Idempotency-Key": "same"}
        async with routers.a.client.stream("POST", CHAT, json=body(CHAT), headers=own | call) as stream:
            request_id = stream.headers[HELD_ID]
            for headers in (other, {}):
                path = f"/v1/requests/{request_id}"
                for method, where in (("GET", path), ("POST", f"{path}/cancel")):
                    reply = await routers.b.client.request(method, where, headers=headers)
                    assert reply.status_code == 404, (method, reply.text)
            assert not routers.a.worker.cancels
            async with routers.b.client.stream("POST", CHAT, json=body(CHAT), headers=other | call) as second:
                assert second.headers[HELD_ID] != request_id, "the same idempotency key of another tenant"
            ended = await routers.b.client.post(f"/v1/requests/{request_id}/cancel", headers=colleague)
            assert ended.status_code == 200


async def test_routers_share_an_account_and_never_exceed_it() -> None:
    broker = MemoryBroker()
    of = ApiKey(
        key_id="k", secret_hash=b"", name="n", tenant="t", flow=1, created=0, requests_per_minute=200, max_concurrent=90
    )
    identity = known(of)
    parts = []
    for number in range(3):
        bus = MemoryBus(broker)
        accounts = Accounts(bus, f"router-{number}", Presence(f"router-{number}", lambda: 0.0), lambda key: True)
        await accounts.open()
        parts.append((bus, accounts))
    results = await asyncio.gather(
        *(parts[number % 3][1].begin(identity, 0) for number in range(150)), return_exceptions=True
    )
    charges = [result for result in results if not isinstance(result, BaseException)]
    assert len(charges) <= 90 and all(isinstance(r, LimitReached) for r in results if isinstance(r, BaseException))
    assert len(charges) >= 90 - 2 * 4, "what lies unused at two others is at most a share each"
    for charge in charges:
        charge.close()
    for _, accounts in parts:
        await accounts.close()
    again = [await parts[0][1].begin(identity, 0) for _ in range(80)]
    assert len(again) == 80
    for charge in again:
        charge.close()
    for bus, _ in parts:
        await bus.close()


async def test_what_a_known_limit_refuses_costs_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    accounts = Accounts(bus, "router-1", Presence("router-1", lambda: 0.0), lambda key: True)
    await accounts.open()
    identity = known(
        ApiKey(key_id="k", secret_hash=b"", name="n", tenant="t", flow=1, created=0, requests_per_minute=1000)
    )
    writes = 0
    update = bus.update

    async def counted(*arguments: Any) -> int:
        nonlocal writes
        writes += 1
        return await update(*arguments)

    monkeypatch.setattr(bus, "update", counted)
    outcomes = [await asyncio.gather(accounts.begin(identity, 0), return_exceptions=True) for _ in range(1500)]
    refused = [outcome for outcome in outcomes if isinstance(outcome[0], LimitReached)]
    num_let_in = len(outcomes) - len(refused)
    assert 1000 <= num_let_in <= 1200, "with what came back meanwhile"
    assert writes <= 25 + num_let_in - 1000, "a share at a time, and nothing for who is refused"
    await bus.close()


def test_queues_of_tenants_are_apart() -> None:
    assert Queue("m", Lane.INTERACTIVE, 3, 1).subject == "requests.m.interactive.f3p1"
    assert Queue("m", Lane.INTERACTIVE, 0, 1).consumer.stream == REQUESTS
