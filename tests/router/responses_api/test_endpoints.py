"""The Responses API on the in-memory broker: conversations, what is stored of them, and who may see what."""

import asyncio
from typing import Any

import pytest

from headrace_router import call_store
from headrace_router.call import Call
from headrace_router.calls import Caller
from headrace_router.preparation import Parsed
from headrace_router.responses_api import store, stored
from headrace_shared.codec import pack_ids
from headrace_shared.errors import QueueFull
from headrace_shared.memory_bus import MemoryBroker, MemoryBus
from headrace_shared.subjects import CALLS, RESPONSES, UNFINISHED, bucket_stream
from tests.byte_model import byte_ids, make_card
from tests.router.keys import add_key, strict_router, until_known
from tests.router.responses_api.client import (
    PATH,
    body,
    create,
    echoes,
    events_of,
    forget_tokens,
    in_steps,
    retrieve,
    text_of,
    until_none_is_unfinished,
)
from tests.router.resumable import two_routers
from tests.router.support import running_router, says


async def test_a_conversation_goes_on_from_a_response_at_any_router() -> None:
    async with two_routers(echoes()) as routers:
        a, b = routers.a.client, routers.b.client
        first = await create(a, "What is the tin?", instructions="Be brief.")
        assert "What is the tin?" in text_of(first) and "Be brief." in text_of(first)
        second = await create(b, "And then?", previous_response_id=first["id"], store=True)
        assert second["previous_response_id"] == first["id"]
        told = text_of(second)
        assert "What is the tin?" in told and "And then?" in told
        assert told.count("Be brief.") == 1, "instructions are not carried over; only the earlier answer told of them"
        assert (await a.get(f"{PATH}/{second['id']}")).json() == second
        listed = (await b.get(f"{PATH}/{second['id']}/input_items?order=asc")).json()
        assert [item["role"] for item in listed["data"]] == ["user", "assistant", "user"]
        page = (await b.get(f"{PATH}/{second['id']}/input_items", params={"limit": 1})).json()
        assert page["data"][0]["content"][0]["text"] == "And then?" and page["has_more"]


async def test_streams_and_whole_answers_say_the_same() -> None:
    async with running_router(says("안녕 the tin! 🦉")) as router:
        whole = await create(router.client)
        reply = await router.client.post(PATH, json=body(stream=True))
        assert reply.headers["content-type"].startswith("text/event-stream")
        events = events_of(reply.text)
        assert text_of(events[-1]["response"]) == text_of(whole) == "안녕 the tin! 🦉"
        assert "".join(event.get("delta", "") for event in events) == "안녕 the tin! 🦉"
        stored = await router.client.get(f"{PATH}/{events[-1]['response']['id']}")
        assert stored.json() == events[-1]["response"]


async def test_what_is_not_stored_is_not_there() -> None:
    async with running_router(says("ok")) as router:
        made = await create(router.client, store=False)
        assert made["store"] is False and (await router.client.get(f"{PATH}/{made['id']}")).status_code == 404
        assert await router.bus.entries(RESPONSES.name) == []
        kept = await create(router.client)
        gone = await router.client.delete(f"{PATH}/{kept['id']}")
        assert gone.json() == {"id": kept["id"], "object": "response", "deleted": True}
        for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
            reply = await router.client.request(method, f"{PATH}/{kept['id']}{path}")
            assert reply.status_code == 404 and reply.json()["error"]["code"] == "response_not_found"
        reply = await router.client.post(PATH, json=body(previous_response_id=kept["id"]))
        error = reply.json()["error"]
        assert (error["code"], error["param"]) == ("previous_response_not_found", "previous_response_id")


async def test_an_answer_that_is_too_long_is_incomplete() -> None:
    async with running_router(says("abcdef")) as router:
        made = await create(router.client, max_output_tokens=3)
        assert made["status"] == "incomplete" and text_of(made) == "abc"
        assert made["incomplete_details"] == {"reason": "max_output_tokens"} and made["usage"]["output_tokens"] == 3


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 100_000}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"input": "x" * 2000}, "input"),
        ({"text": {"format": {"type": "json_schema", "name": "a b", "schema": {}}}}, "text.format.name"),
        (
            {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "nothing"}}}},
            "text.format.schema",
        ),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        (
            {"tools": [{"type": "function", "name": "a"}], "tool_choice": {"type": "function", "name": "b"}},
            "tool_choice.name",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"input": 3}, "input"),
        ({"metadata": 3}, "metadata"),
    ],
)
async def test_bad_input_is_named_as_the_client_wrote_it(fields: dict[str, Any], param: str) -> None:
    async with running_router(says("ok")) as router:
        reply = await router.client.post(PATH, json=body() | fields)
        error = reply.json()["error"]
        assert reply.status_code == 400 and error["param"] == param, error
        assert error["type"] == "invalid_request_error" and not router.worker.requests


async def test_bad_queries_are_named() -> None:
    async with running_router(says("ok")) as router:
        made = await create(router.client)
        for path, param in (
            ("?stream=true&starting_after=x", "starting_after"),
            ("?stream=maybe", "stream"),
            ("?stream=true", "stream"),
            ("/input_items?limit=0", "limit"),
            ("/input_items?order=up", "order"),
            ("/input_items?after=msg_0", "after"),
        ):
            reply = await router.client.get(f"{PATH}/{made['id']}{path}")
            assert reply.status_code == 400 and reply.json()["error"]["param"] == param, reply.text


async def test_a_conversation_is_shortened_where_that_is_asked_for() -> None:
    async with running_router(says("ok")) as router:
        turns = [{"role": "user", "content": f"{number} " + "x" * 40} for number in range(20)]
        refused = await router.client.post(PATH, json=body(turns))
        assert refused.json()["error"]["code"] == "context_length_exceeded"
        made = await create(router.client, turns, truncation="auto")
        assert made["truncation"] == "auto" and made["usage"]["input_tokens"] < 256
        prompt = router.worker.requests[-1].prompt
        assert pack_ids(byte_ids("19 ")) in prompt, "the last question is there"
        listed = await router.client.get(f"{PATH}/{made['id']}/input_items?limit=100")
        assert len(listed.json()["data"]) == 20


@pytest.mark.parametrize(("num_turns", "size"), [(1000, 0), (400, 2), (60, 150)])
async def test_a_conversation_is_shortened_in_few_attempts(
    monkeypatch: pytest.MonkeyPatch, num_turns: int, size: int
) -> None:
    attempts = []
    begin = Caller.begin

    async def counted(self: Caller, call: Call, parsed: Parsed, *, is_trial: bool) -> None:
        attempts.append(parsed)
        await begin(self, call, parsed, is_trial=is_trial)

    monkeypatch.setattr(Caller, "begin", counted)
    async with running_router(says("ok")) as router:
        turns = [{"role": "user", "content": f"{number} " + "x" * size} for number in range(num_turns)]
        made = await create(router.client, turns, truncation="auto")
        assert text_of(made) == "ok" and len(attempts) <= 8
        if size < 100:
            assert made["usage"]["input_tokens"] > 256 / 2, "not much more is dropped than must be"


async def test_how_long_a_prompt_is() -> None:
    async with running_router(says("ok"), card=make_card(context=4096)) as router:
        for fields in ({}, {"instructions": "Be brief."}, {"tools": [{"type": "function", "name": "f"}]}):
            made = await create(router.client, **fields)
            counted = await router.client.post(f"{PATH}/input_tokens", json=body() | fields)
            expected = {"object": "response.input_tokens", "input_tokens": made["usage"]["input_tokens"]}
            assert counted.json() == expected
        later = {"previous_response_id": made["id"]}
        counted = await router.client.post(f"{PATH}/input_tokens", json=body() | later)
        again = await create(router.client, **later)
        assert counted.json()["input_tokens"] == again["usage"]["input_tokens"]


async def test_the_same_key_is_the_same_response() -> None:
    gate = asyncio.Event()
    gate.set()
    async with two_routers(in_steps("the tin", gate)) as routers:
        headers = {"Idempotency-Key": "k1"}
        first = (await routers.a.client.post(PATH, json=body(), headers=headers)).json()
        again = (await routers.b.client.post(PATH, json=body(), headers=headers)).json()
        assert again["id"] == first["id"] and text_of(again) == text_of(first) == "the tin"
        headers = {"Idempotency-Key": "k2"}
        early = (await routers.a.client.post(PATH, json=body(background=True), headers=headers)).json()
        late = (await routers.b.client.post(PATH, json=body(background=True), headers=headers)).json()
        assert early["id"] == late["id"]
        assert text_of(await retrieve(routers.b.client, late["id"], "completed")) == "the tin"
        other = await routers.b.client.post(PATH, json=body("Other"), headers=headers)
        assert other.status_code == 422
        refused = await routers.a.client.post(PATH, json=body(), headers={"Headrace-Resumable": "true"})
        assert refused.json()["error"]["param"] == "Headrace-Resumable"


@pytest.mark.parametrize("fields", [{}, {"background": True}])
async def test_repeating_a_call_does_not_bring_back_what_was_deleted(fields: dict[str, Any]) -> None:
    async with running_router(says("the tin")) as router:
        headers = {"Idempotency-Key": "k"}
        made = (await router.client.post(PATH, json=body(**fields), headers=headers)).json()
        await retrieve(router.client, made["id"], "completed")
        assert (await router.client.delete(f"{PATH}/{made['id']}")).status_code == 200
        again = await router.client.post(PATH, json=body(**fields), headers=headers)
        assert again.status_code == (410 if fields else 200), again.text
        assert (await router.client.get(f"{PATH}/{made['id']}")).status_code == 404
        await until_none_is_unfinished(router)


@pytest.mark.parametrize("fields", [{}, {"background": True}])
async def test_a_stored_response_is_repeated_when_its_tokens_are_gone(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    async with running_router(says("the tin")) as router:
        headers = {"Idempotency-Key": "k"}
        made = (await router.client.post(PATH, json=body(**fields), headers=headers)).json()
        ended = await retrieve(router.client, made["id"], "completed")
        await forget_tokens(router)
        for entry in await router.bus.entries(CALLS.name):
            await router.bus.remove(CALLS.name, entry.key)
        monkeypatch.setattr(call_store, "SAFE_DEDUPE_S", -1.0)
        monkeypatch.setattr(call_store, "SURE_LOG_S", -1.0)
        again = await router.client.post(PATH, json=body(**fields), headers=headers)
        assert again.status_code == 200 and again.json() == ended, again.text
        await router.client.delete(f"{PATH}/{made['id']}")
        gone = await router.client.post(PATH, json=body(**fields), headers=headers)
        assert gone.status_code == 410 and len(router.worker.requests) == 1


async def test_responses_are_their_tenant_s_alone() -> None:
    async with strict_router(says("secret")) as router:
        own, colleague, other = [
            await add_key(router.bus, tenant=tenant, flow=flow) for tenant, flow in (("a", 1), ("a", 1), ("b", 2))
        ]
        for headers in (own, colleague, other):
            await until_known(router, headers)
        client = router.client
        for fields in ({}, {"background": True}):
            made = (await client.post(PATH, json=body(**fields), headers=own)).json()
            where = f"{PATH}/{made['id']}"
            for method, path in (
                ("GET", where),
                ("GET", f"{where}?stream=true"),
                ("GET", f"{where}/input_items"),
                ("POST", f"{where}/cancel"),
                ("DELETE", where),
            ):
                assert (await client.request(method, path)).status_code == 401
                reply = await client.request(method, path, headers=other)
                assert reply.status_code == 404 and "secret" not in reply.text
            reply = await client.post(PATH, json=body(previous_response_id=made["id"]), headers=other)
            assert reply.json()["error"]["code"] == "previous_response_not_found"
            reply = await client.post(f"{PATH}/input_tokens", json=body(previous_response_id=made["id"]), headers=other)
            assert reply.status_code == 404
            await retrieve(client, made["id"], "completed", colleague)
            reply = await client.post(PATH, json=body(previous_response_id=made["id"]), headers=colleague)
            assert reply.status_code == 200


async def test_a_conversation_that_is_too_long_to_be_stored() -> None:
    async with running_router(says("ok")) as router:
        noise = "".join(chr(0x4E00 + (number * 7919) % 20000) for number in range(400_000))
        given = [{"role": "user", "content": noise}, {"role": "user", "content": "Hi"}]
        fields = body(given, truncation="auto")
        refused = await router.client.post(PATH, json=fields | {"store": True})
        assert refused.status_code == 413 and refused.json()["error"]["param"] == "store"
        made = (await router.client.post(PATH, json=fields)).json()
        assert made["store"] is False and (await router.client.get(f"{PATH}/{made['id']}")).status_code == 404


async def test_a_conversation_that_could_not_be_unpacked_is_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "MAX_BYTES", 10_000)
    async with running_router(says("ok")) as router:
        given = [{"role": "user", "content": "x" * 20_000}, {"role": "user", "content": "Hi"}]
        fields = body(given, truncation="auto")
        refused = await router.client.post(PATH, json=fields | {"background": True})
        assert refused.status_code == 413 and refused.json()["error"]["param"] == "store"
        made = (await router.client.post(PATH, json=fields)).json()
        assert made["store"] is False and text_of(made) == "ok"


async def test_who_has_stored_much_stores_no_more_until_something_is_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "OWNERS", RESPONSES.max_bytes // 2000)
    async with running_router(says("ok")) as router:
        made = []
        while (latest := await create(router.client))["store"]:
            made.append(latest["id"])
        assert 1 <= len(made) <= 20 and text_of(latest) == "ok"
        for fields in ({"store": True}, {"background": True}):
            refused = await router.client.post(PATH, json=body(**fields))
            assert refused.status_code == 403 and refused.json()["error"]["code"] == "response_quota_exceeded"
        other = await router.client.post(PATH, json=body(), headers={"Authorization": "Bearer other"})
        assert other.json()["store"] is True
        await router.client.delete(f"{PATH}/{made[0]}")
        assert (await create(router.client))["store"] is True


async def test_a_full_store_is_told_as_such() -> None:
    class Full(MemoryBus):
        async def create(self, bucket: str, key: str, value: bytes) -> int:
            if bucket == RESPONSES.name:
                raise QueueFull
            return await super().create(bucket, key, value)

    broker = MemoryBroker()
    async with running_router(says("ok"), buses=(Full(broker), MemoryBus(broker))) as router:
        refused = await router.client.post(PATH, json=body(background=True))
        assert refused.json()["error"]["code"] == "response_store_full" and int(refused.headers["retry-after"]) >= 1


def test_buckets_are_bounded() -> None:
    for bucket in (RESPONSES, UNFINISHED):
        assert bucket.ttl_s is not None and bucket.ttl_s <= 86_400.0 and bucket.max_bytes <= 2**30
        assert bucket_stream(bucket.name).startswith("KV_")
