"""What is on the wire: framing, order and headers of streams, and headers of everything."""

import asyncio
import json
import re
from typing import Any

import pytest

from headrace_router.settings import RouterSettings
from headrace_shared.messages import FinishReason, Outcome, Request
from tests.byte_model import END, MODEL, byte_ids, make_card
from tests.router.keys import add_key, strict_router, until_known
from tests.router.resumable import CHAT, TEXT
from tests.router.support import ScriptedWorker, running_router, says
from tests.router.wire import Reply, request_bytes, send

ID = re.compile(r"[0-9a-f]{32}")
PATHS = [CHAT, TEXT]
SAID = 'a "ř"\n🦉'


def asked(path: str, **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "prompt": "Hi"}
    del body["prompt" if path == CHAT else "messages"]
    return body | fields


def streamed(path: str, **fields: Any) -> bytes:
    usage = {"stream_options": {"include_usage": True}}
    return request_bytes(path, asked(path, stream=True, **usage | fields))


def text_of(reply: Reply, index: int = 0) -> str:
    choices = [choice for event in reply.data for choice in event["choices"] if choice["index"] == index]
    return "".join(choice.get("delta", choice).get("content", choice.get("text", "")) for choice in choices)


@pytest.mark.parametrize("path", PATHS)
async def test_a_stream_is_its_events_and_nothing_else(path: str) -> None:
    """`data: `, JSON in one line, an empty line; a piece of the body is whole events."""
    async with running_router(says(SAID, pause_s=0.01)) as router:
        reply, again = await send(router.port, streamed(path), streamed(path))
        assert reply.status == again.status == 200  # the connection outlives a stream
        assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert reply.headers["cache-control"] == "no-cache"
        assert reply.headers["x-accel-buffering"] == "no"
        assert "content-length" not in reply.headers
        written = [json.dumps(event, ensure_ascii=False, separators=(",", ":")) for event in reply.data]
        assert reply.body.decode() == "".join(f"data: {line}\n\n" for line in [*written, "[DONE]"])
        assert all(piece.startswith(b"data: ") and piece.endswith(b"\n\n") for piece in reply.pieces)
        assert len(reply.pieces) > 3
        assert text_of(reply) == text_of(again) == SAID


@pytest.mark.parametrize("path", PATHS)
async def test_an_event_is_one_line_for_whoever_reads_lines(path: str) -> None:
    """Of str.splitlines: clients read with it."""
    said = "".join(f"{number}{char}" for number, char in enumerate("\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"))
    async with running_router(says(said)) as router:
        [reply] = await send(router.port, streamed(path, max_tokens=100))
        lines = [line for line in reply.body.decode().splitlines() if line]
        assert all(line.startswith("data: ") for line in lines)
        assert [json.loads(line[6:]) for line in lines[:-1]] == reply.data
        assert text_of(reply) == said


@pytest.mark.parametrize("path", PATHS)
async def test_the_order_of_a_stream(path: str) -> None:
    kind, prefix = ("chat.completion.chunk", "chatcmpl-") if path == CHAT else ("text_completion", "cmpl-")
    async with running_router(says("abc", pause_s=0.01)) as router:
        [reply] = await send(router.port, streamed(path))
        *chunks, last, usage = reply.data
        for event in reply.data:
            assert (event["object"], event["model"]) == (kind, MODEL)
            assert (event["id"], event["created"]) == (usage["id"], usage["created"])
        assert usage["id"].startswith(prefix) and isinstance(usage["created"], int)
        assert [event["choices"][0]["finish_reason"] for event in (*chunks, last)] == [None] * 3 + ["stop"]
        assert all(event["usage"] is None for event in (*chunks, last))
        assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 4
        assert reply.events[-1] == b"data: [DONE]" and reply.events.count(b"data: [DONE]") == 1
        if path == CHAT:
            deltas = [event["choices"][0]["delta"] for event in (*chunks, last)]
            assert deltas == [{"role": "assistant", "content": "a"}, {"content": "b"}, {"content": "c"}, {}]


async def test_nothing_but_blank_lines_before_the_first_token() -> None:
    """Who measures the time to the first event measures that to the first token, even if it shows nothing yet."""

    async def script(worker: ScriptedWorker, request: Request) -> None:
        await asyncio.sleep(0.4)
        owl = byte_ids("🦉")
        for i, token in enumerate(owl):
            worker.frame(request, [token], i)
            await asyncio.sleep(0.1)
        worker.frame(request, [END], 4, finish=FinishReason.STOP)

    settings = RouterSettings(port=0, drain_delay_s=0.0, ping_interval_s=0.1)
    async with running_router(script, settings=settings) as router:
        [reply] = await send(router.port, streamed(CHAT))
        first = next(i for i, piece in enumerate(reply.pieces) if piece.startswith(b"data: "))
        assert first >= 2 and not b"".join(reply.pieces[:first]).strip()
        deltas = [event["choices"][0]["delta"] for event in reply.data[:-1]]
        assert deltas == [{"role": "assistant", "content": ""}, {"content": "🦉"}, {}]


@pytest.mark.parametrize("path", PATHS)
async def test_choices_come_as_they_are_made(path: str) -> None:
    async with running_router(says("ab", pause_s=0.01)) as router:
        [reply] = await send(router.port, streamed(path, n=3))
        choices = [choice for event in reply.data[:-1] for choice in event["choices"]]
        assert [choice["index"] for choice in choices] == [0, 1, 2] * 3
        assert [choice["finish_reason"] for choice in choices] == [None] * 6 + ["stop"] * 3
        assert [text_of(reply, index) for index in range(3)] == ["ab"] * 3
        if path == CHAT:
            assert [choice["delta"].get("role") for choice in choices] == ["assistant"] * 3 + [None] * 6


@pytest.mark.parametrize("path", PATHS)
async def test_a_failure_in_mid_stream_is_an_event_and_done(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    async def script(worker: ScriptedWorker, request: Request) -> None:
        worker.frame(request, byte_ids("ab"), 0)
        await worker.end(request, Outcome.FAILED, "engine_error", "It did not work.")

    async with running_router(script) as router:
        headers = {"X-Request-Id": "mine-1"}
        failing = request_bytes(path, asked(path, stream=True), headers=headers)
        reply, alive = await send(router.port, failing, request_bytes("/v1/models"))
        error = {"message": "It did not work.", "type": "server_error", "param": None, "code": "engine_error"}
        assert reply.data[-1] == {"error": {**error, "request_id": "mine-1"}}
        [told] = [line for line in capsys.readouterr().out.splitlines() if "stream failed" in line]
        assert "mine-1" in told
        assert reply.events[-1] == b"data: [DONE]"
        assert text_of(Reply(200, {}, b"".join(event + b"\n\n" for event in reply.events[:-2]), [])) == "ab"
        assert not any(choice["finish_reason"] for event in reply.data[:-1] for choice in event["choices"])
        assert alive.status == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("include", "shown"), [(False, "hel"), (True, "hello wo")])
async def test_a_stop_string_over_several_tokens(path: str, stream: bool, include: bool, shown: str) -> None:
    async with running_router(says("hello world", pause_s=0.001)) as router:
        body = asked(path, stop=["lo wo", "xyz"], include_stop_str_in_output=include, stream=stream)
        [reply] = await send(router.port, request_bytes(path, body))
        if stream:
            assert text_of(reply) == shown
            [end] = [choice for event in reply.data for choice in event["choices"] if choice["finish_reason"]]
        else:
            [end] = json.loads(reply.body)["choices"]
            assert end.get("message", {}).get("content", end.get("text")) == shown
        assert (end["finish_reason"], end["stop_reason"]) == ("stop", "lo wo")


CALL = '<tool_call>\n{"name": "f", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]


async def test_a_call_is_the_same_wherever_its_tokens_are_cut() -> None:
    """Into two frames, at each token, and in one."""
    tokens = [*byte_ids(CALL), END]
    cuts = iter(range(len(tokens)))

    async def script(worker: ScriptedWorker, request: Request) -> None:
        cut = next(cuts)
        if cut:
            worker.frame(request, tokens[:cut], 0)
            await asyncio.sleep(0.002)
        worker.frame(request, tokens[cut:], cut, finish=FinishReason.STOP)

    async with running_router(script, card=make_card(context=4096)) as router:
        for reply in await send(router.port, *[streamed(CHAT, tools=TOOLS, max_tokens=200)] * len(tokens)):
            deltas = [event["choices"][0]["delta"] for event in reply.data[:-1]]
            first, *others = [piece for delta in deltas for piece in delta.get("tool_calls", [])]
            assert (first["type"], first["function"]["name"]) == ("function", "f") and first["id"]
            assert all(
                set(piece) == {"index", "function"} and set(piece["function"]) == {"arguments"} for piece in others
            )
            arguments = "".join(piece["function"]["arguments"] for piece in (first, *others))
            assert json.loads(arguments) == {"city": "Rome", "days": 2}
            assert text_of(reply) == ""
            assert reply.data[-2]["choices"][0]["finish_reason"] == "tool_calls"


async def test_a_call_begins_with_its_name_and_goes_on_with_arguments() -> None:
    text = CALL + '\n<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
    async with running_router(says(text, pause_s=0.001), card=make_card(context=4096)) as router:
        whole = asked(CHAT, tools=TOOLS, max_tokens=500)
        reply, answer = await send(router.port, streamed(CHAT, tools=TOOLS, max_tokens=500), request_bytes(CHAT, whole))
        deltas = [event["choices"][0]["delta"] for event in reply.data[:-1]]
        pieces = [piece for delta in deltas for piece in delta.get("tool_calls", [])]
        arguments = {0: "", 1: ""}
        begun: dict[int, dict[str, Any]] = {}
        for piece in pieces:
            if piece["index"] not in begun:
                assert set(piece) == {"index", "id", "type", "function"} and piece["type"] == "function"
                assert set(piece["function"]) == {"name", "arguments"}
                begun[piece["index"]] = piece
            else:
                assert set(piece) == {"index", "function"} and set(piece["function"]) == {"arguments"}
            arguments[piece["index"]] += piece["function"]["arguments"]
        assert [piece["index"] for piece in pieces] == sorted(piece["index"] for piece in pieces)
        assert reply.data[-2]["choices"][0]["finish_reason"] == "tool_calls"
        told = json.loads(answer.body)["choices"][0]
        assert told["finish_reason"] == "tool_calls" and told["message"]["content"] is None
        for number, call in enumerate(told["message"]["tool_calls"]):
            assert set(call) == {"id", "type", "function"}
            assert call["function"] == {"name": begun[number]["function"]["name"], "arguments": arguments[number]}
            assert len(begun[number]["id"]) <= 64 and len(call["id"]) == len(begun[number]["id"])
        assert json.loads(arguments[0]) == {"city": "Rome", "days": 2} and json.loads(arguments[1]) == {}


async def test_every_response_has_an_id_and_a_time() -> None:
    requests = [
        request_bytes(CHAT, asked(CHAT)),
        streamed(TEXT),
        request_bytes(TEXT, {"model": MODEL}),
        request_bytes(TEXT, {"model": "gpt-9", "prompt": "a"}),
        request_bytes(TEXT, b"{nope"),
        request_bytes(TEXT, b"{}", headers={"Content-Type": "text/plain"}),
        request_bytes(TEXT),
        request_bytes("/v1/models"),
        request_bytes("/v1/models/gpt-9"),
        request_bytes("/v1/nowhere"),
        request_bytes("/tokenize", {"model": MODEL, "prompt": "a"}),
        request_bytes("/tokenize", {"model": MODEL}),
        request_bytes("/v1/requests/nobody?wait=false"),
    ]
    statuses = [200, 200, 400, 404, 400, 415, 405, 200, 404, 404, 200, 400, 404]
    async with strict_router(says("ok")) as router:
        key = await add_key(router.bus)
        await until_known(router, key)
        refused = await send(router.port, *requests)
        assert {reply.status for reply in refused} == {401}
        with_key = "".join(f"{name}: {value}\r\n" for name, value in key.items()).encode()
        authorized = [request.replace(b"Host: x\r\n", b"Host: x\r\n" + with_key) for request in requests]
        answered = await send(router.port, *authorized)
        assert [reply.status for reply in answered] == statuses
        ids = [reply.headers["x-request-id"] for reply in (*refused, *answered)]
        assert all(ID.fullmatch(given) for given in ids) and len(set(ids)) == len(ids)
        assert all(0 <= int(reply.headers["openai-processing-ms"]) < 20_000 for reply in (*refused, *answered))
        named = [request.replace(b"Host: x\r\n", b"Host: x\r\nX-Request-Id: order-7\r\n") for request in authorized]
        assert {reply.headers["x-request-id"] for reply in await send(router.port, *named)} == {"order-7"}
        for reply in (*refused, *answered):
            if reply.status != 200:
                assert set(reply.error) == {"message", "type", "param", "code"} and reply.error["code"]


async def test_what_is_wrong_in_a_url_is_named_and_no_422() -> None:
    async with running_router(says("ok")) as router:
        [reply] = await send(router.port, request_bytes("/v1/requests/" + "0" * 32 + "?wait=perhaps"))
        assert reply.status == 400
        assert (reply.error["type"], reply.error["param"]) == ("invalid_request_error", "wait")


async def test_head_is_get_without_a_body_and_options_are_refused() -> None:
    async with running_router(says("ok")) as router:
        for path in ("/v1/models", f"/v1/models/{MODEL}", "/version", "/load", "/metrics", "/health", "/live"):
            head, got = await send(router.port, request_bytes(path, method="HEAD"), request_bytes(path))
            assert head.status == got.status == 200 and head.body == b"" != got.body
            assert head.headers["content-type"] == got.headers["content-type"]
        [missing] = await send(router.port, request_bytes("/v1/models/gpt-9", method="HEAD"))
        assert missing.status == 404
        for path in (CHAT, TEXT, "/v1/models"):
            [options] = await send(router.port, request_bytes(path, method="OPTIONS"))
            assert (options.status, options.error["code"]) == (405, "method_not_allowed")
            assert options.headers["allow"] == ("GET, HEAD" if path == "/v1/models" else "POST")
        for path, allowed in (("/v1/files", "GET, POST"), ("/v1/responses/resp_1", "DELETE, GET"), (CHAT, "POST")):
            [refused] = await send(router.port, request_bytes(path, method="PUT"))
            assert (refused.status, refused.headers["allow"]) == (405, allowed)
        assert router.worker.requests == []


@pytest.mark.parametrize("path", PATHS)
async def test_unknown_fields_are_accepted_wherever_they_stand(path: str) -> None:
    new: dict[str, Any] = {"brand_new": {"deep": [1, None, {"x": "y"}]}}
    message = {"role": "user", "content": [{"type": "text", "text": "Hi", **new}], **new}
    fields: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True, **new}, **new}
    fields["response_format"] = {"type": "text", **new}
    if path == CHAT:
        fields["messages"] = [message]
    async with running_router(says("ok")) as router:
        reply, plain = await send(router.port, request_bytes(path, asked(path, **fields)), streamed(path))
        assert text_of(reply) == "ok"
        assert reply.data[-1]["usage"] == plain.data[-1]["usage"]


async def test_tries_that_a_client_counts_are_counted() -> None:
    async with running_router(says("ok")) as router:
        for count in ("0", "1", "2", "nonsense"):
            await send(router.port, request_bytes(TEXT, asked(TEXT), headers={"x-stainless-retry-count": count}))
        [metrics] = await send(router.port, request_bytes("/metrics"))
        assert b"\nheadrace_client_retries_total 2.0\n" in metrics.body
