"""The Messages API on the in-memory broker."""

import json
from typing import Any

import pytest

from headrace_router.settings import RouterSettings
from headrace_shared.messages import FinishReason, Outcome, Request
from tests.byte_model import CONTEXT, MODEL, byte_ids, make_card
from tests.router.keys import add_key, strict_router, until_known
from tests.router.support import ScriptedWorker, running_router, says

PATH = "/v1/messages"
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
TOOL = {"name": "f", "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}


def body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 100, "messages": [{"role": "user", "content": "Hi"}], **fields}


async def test_an_answer_and_its_headers() -> None:
    async with running_router(says("안녕 the tin")) as router:
        reply = await router.client.post(PATH, json=body(), headers={"anthropic-version": "2023-06-01"})
        message = reply.json()
        assert reply.status_code == 200 and reply.headers["request-id"] == reply.headers["x-request-id"]
        assert message["content"] == [{"type": "text", "text": "안녕 the tin", "citations": None}]
        assert (message["stop_reason"], message["role"], message["model"]) == ("end_turn", "assistant", MODEL)
        assert message["usage"]["output_tokens"] == len("안녕 the tin".encode()) + 1


async def test_stop_sequences_and_limits() -> None:
    async with running_router(says("one two three")) as router:
        stopped = (await router.client.post(PATH, json=body(stop_sequences=["two"]))).json()
        assert stopped["content"][0]["text"] == "one " and stopped["stop_sequence"] == "two"
        assert stopped["stop_reason"] == "stop_sequence"
        cut = (await router.client.post(PATH, json=body(max_tokens=3))).json()
        assert cut["content"][0]["text"] == "one" and cut["stop_reason"] == "max_tokens"


async def test_more_tokens_than_there_is_room_for() -> None:
    """Clients ask for what another model could give."""
    async with running_router(says("x" * 1000, FinishReason.LENGTH)) as router:
        reply = await router.client.post(PATH, json=body(max_tokens=32_000))
        message = reply.json()
        assert message["stop_reason"] == "model_context_window_exceeded", message
        assert message["usage"]["input_tokens"] + message["usage"]["output_tokens"] == CONTEXT
        long = body(messages=[{"role": "user", "content": "x" * 2000}], max_tokens=1)
        reply = await router.client.post(PATH, json=long)
        assert reply.status_code == 400 and "context" in reply.json()["error"]["message"]


async def test_calls_and_their_results() -> None:
    async with running_router(says(CALL), card=make_card(context=4096)) as router:
        first = (await router.client.post(PATH, json=body(tools=[TOOL]))).json()
        (use,) = first["content"]
        assert (use["type"], use["name"], use["input"]) == ("tool_use", "f", {"a": 1})
        assert first["stop_reason"] == "tool_use"
        result = {"type": "tool_result", "tool_use_id": use["id"], "content": "3"}
        turns = [*body()["messages"], {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
        again = await router.client.post(PATH, json=body(messages=turns, tools=[TOOL]))
        assert again.status_code == 200, again.text


async def test_an_answer_that_has_been_begun_goes_on() -> None:
    async with running_router(says("Rome.")) as router:
        turns = [*body()["messages"], {"role": "assistant", "content": "It is"}]
        message = (await router.client.post(PATH, json=body(messages=turns))).json()
        assert message["content"][0]["text"] == "Rome."
        prompt = router.worker.requests[-1].prompt
        assert prompt.endswith(b"".join(token.to_bytes(4, "little") for token in byte_ids("is")))


async def test_how_long_a_prompt_is() -> None:
    async with running_router(says("ok"), card=make_card(context=4096)) as router:
        asked = body(system="Be brief.", tools=[{"name": "f", "input_schema": {}}], max_tokens=9)
        message = (await router.client.post(PATH, json=asked)).json()
        del asked["max_tokens"]
        counted = await router.client.post(f"{PATH}/count_tokens", json=asked)
        assert counted.json() == {"input_tokens": message["usage"]["input_tokens"]}


async def test_how_long_a_prompt_is_that_does_not_fit() -> None:
    async with running_router(says("ok")) as router:
        asked = body(messages=[{"role": "user", "content": "x" * 1000}], tools=[TOOL])
        del asked["max_tokens"]
        counted = await router.client.post(f"{PATH}/count_tokens", json=asked)
        assert counted.status_code == 200 and counted.json()["input_tokens"] > 1000, counted.text


@pytest.mark.parametrize(
    ("fields", "status", "kind", "named"),
    [
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
        ({"model": "nothing"}, 404, "not_found_error", "nothing"),
        ({"temperature": 9}, 400, "invalid_request_error", "temperature"),
        ({"stop_sequences": [""]}, 400, "invalid_request_error", "stop_sequences"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, 400, "invalid_request_error", "tools[0].name"),
    ],
)
async def test_errors_have_anthropic_s_shape(fields: dict[str, Any], status: int, kind: str, named: str) -> None:
    async with running_router(says("ok")) as router:
        for path in (PATH, f"{PATH}/count_tokens"):
            if path != PATH and "model" not in fields and "tools" not in fields:
                continue
            reply = await router.client.post(path, json=body() | fields)
            told = reply.json()
            assert reply.status_code == status and told["type"] == "error", told
            assert told["error"]["type"] == kind and named in told["error"]["message"]


async def test_wrong_ways_and_methods_have_it_too() -> None:
    async with running_router(says("ok")) as router:
        for method, path, status in (("GET", PATH, 405), ("POST", f"{PATH}/nothing", 404), ("POST", PATH, 400)):
            reply = await router.client.request(method, path, content=b"{")
            assert reply.status_code == status and reply.json()["type"] == "error", reply.text
        reply = await router.client.post("/v1/messages2")
        assert reply.json()["error"]["code"] == "not_found"


async def test_either_header_lets_in() -> None:
    async with strict_router(says("ok")) as router:
        bearer = await add_key(router.bus)
        await until_known(router, bearer)
        key = bearer["Authorization"].removeprefix("Bearer ")
        for headers in (bearer, {"x-api-key": key, "anthropic-version": "2023-06-01"}):
            assert (await router.client.post(PATH, json=body(), headers=headers)).status_code == 200
        for headers in ({}, {"x-api-key": key + "x"}):
            reply = await router.client.post(PATH, json=body(), headers=headers)
            assert reply.status_code == 401 and reply.json()["error"]["type"] == "authentication_error"


async def test_who_is_refused_for_load_is_told_to_come_back() -> None:
    settings = RouterSettings(port=0, drain_delay_s=0.0, drain_timeout_s=5.0, max_queued_requests=1)
    async with running_router(says("ok"), settings=settings, has_worker=False) as router:
        refused = []
        async with router.client.stream("POST", PATH, json=body(stream=True)) as first:
            assert first.status_code == 200
            for _ in range(3):
                refused.append(await router.client.post(PATH, json=body()))
                if refused[-1].status_code != 200:
                    break
        assert refused[-1].status_code == 529 and refused[-1].json()["error"]["type"] == "overloaded_error"
        assert int(refused[-1].headers["retry-after"]) >= 1


async def test_a_failure_in_the_stream_is_told() -> None:
    async def fails(worker: ScriptedWorker, request: Request) -> None:
        worker.frame(request, byte_ids("ab"), 0)
        await worker.end(request, Outcome.FAILED, "internal_error", "The worker broke.")

    async with running_router(fails) as router:
        reply = await router.client.post(PATH, json=body(stream=True))
        assert reply.status_code == 200
        last = reply.text.rstrip("\n").split("\n\n")[-1]
        name, data = last.split("\n")
        assert name == "event: error"
        assert json.loads(data.removeprefix("data: "))["error"] == {"type": "api_error", "message": "The worker broke."}
        whole = await router.client.post(PATH, json=body())
        assert whole.status_code == 500 and whole.json()["error"]["type"] == "api_error"
