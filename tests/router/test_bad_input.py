"""Bad input ends at the router: a 4xx in OpenAI's shape, nothing in the queue, the next request is served."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from headrace_router.http_protocol import BoundedHttpProtocol
from headrace_router.settings import RouterSettings
from headrace_shared.message_sizes import largest_message
from tests.byte_model import CHATML, CONTEXT, MODEL, make_card
from tests.router.raw_http import raw_connection
from tests.router.support import Router, prompt_of, running_router, says

MESSAGES = [{"role": "user", "content": "Hi"}]
KEYS = {"message", "type", "param", "code"}


@pytest.fixture
async def router() -> AsyncIterator[Router]:
    settings = RouterSettings(port=0, drain_delay_s=0.0, drain_timeout_s=5.0, max_body_bytes=2_000_000)
    async with running_router(says("ok"), settings=settings) as running:
        yield running
        # Whatever happened: nothing was queued, and the next request is served.
        assert running.worker.requests == []
        reply = await running.client.post("/v1/completions", json={"model": MODEL, "prompt": "a"})
        assert reply.json()["choices"][0]["text"] == "ok"


def assert_refused(reply: httpx.Response, status: int, param: str | None = None, code: str | None = None) -> None:
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert set(error) == KEYS
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    if code is not None:
        assert error["code"] == code
    for leak in ("/work", "Traceback", "headrace_", "tokens.router", "requests.tiny", "pydantic", "nats"):
        assert leak not in reply.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "status", "param", "code"),
    [
        ({"model": "gpt-9"}, 404, "model", "model_not_found"),
        ({"messages": []}, 400, "messages", None),
        ({"messages": "hi"}, 400, "messages", "invalid_type"),
        ({"max_tokens": -1}, 400, "max_tokens", None),
        ({"max_tokens": 10**400}, 400, "max_tokens", None),
        ({"temperature": "hot"}, 400, "temperature", "invalid_type"),
        ({"logit_bias": {"266": 1}}, 400, "logit_bias", None),
        ({"messages": [{"role": "user", "content": "x" * CONTEXT}]}, 400, "messages", "context_length_exceeded"),
        ({"messages": [{"role": "user", "content": "x" * 100_000}]}, 400, "messages", "context_length_exceeded"),
    ],
)
async def test_chat(
    router: Router, stream: bool, fields: dict[str, Any], status: int, param: str, code: str | None
) -> None:
    body = {"model": MODEL, "messages": MESSAGES, "stream": stream, **fields}
    reply = await router.client.post("/v1/chat/completions", json=body)
    assert reply.headers["content-type"] == "application/json"
    assert_refused(reply, status, param, code)


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], ["a", ""], [-1], [266], [[1], [-5]]])
async def test_prompts(router: Router, prompt: Any) -> None:
    reply = await router.client.post("/v1/completions", json={"model": MODEL, "prompt": prompt, "max_tokens": 5})
    assert_refused(reply, 400, "prompt")


async def test_the_prompt_that_is_wrong_is_named(router: Router) -> None:
    for prompt, name in ((["a", "", "b"], "'prompt[1]' must"), ([[1], [1, 2], [1] * CONTEXT], "'prompt[2]' has ")):
        reply = await router.client.post("/v1/completions", json={"model": MODEL, "prompt": prompt})
        assert_refused(reply, 400, "prompt")
        assert name in reply.json()["error"]["message"]


async def test_bodies(router: Router) -> None:
    client = router.client
    for path in ("/v1/chat/completions", "/v1/completions"):
        for body in (b"", b"{nope", b"[" * 10_000, b"[1]", b"null"):
            reply = await client.post(path, content=body, headers={"content-type": "application/json"})
            assert_refused(reply, 400)
        for content_type in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
            reply = await client.post(path, content=b"{}", headers={"content-type": content_type})
            assert_refused(reply, 415)
        reply = await client.post(
            path, content=b"{}", headers={"content-type": "application/json", "content-encoding": "gzip"}
        )
        assert_refused(reply, 415)


@pytest.mark.parametrize(
    "part",
    [
        b'"zzz":[' + b"[]," * 200_000 + b"1]",
        b'"zzz":{' + b'"":1,' * 200_000 + b'"a":1}',
        b'"zzz":[' + b"1," * 990_000 * 3 + b"1]",
    ],
    ids=["lists", "keys", "elements"],
)
async def test_a_body_of_too_many_values_is_refused_before_they_are_made(part: bytes) -> None:
    settings = RouterSettings(port=0, drain_delay_s=0.0, drain_timeout_s=5.0)
    async with running_router(says("ok"), settings=settings) as router:
        body = b'{"model":"tiny","prompt":"a",' + part + b"}"
        reply = await router.client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
        assert_refused(reply, 413, code="payload_too_large")
        # A prompt that is as large as a context may hold as many of them as it likes.
        reply = await router.client.post("/v1/completions", json={"model": MODEL, "prompt": "[" * 90_000})
        assert_refused(reply, 400, "prompt", "context_length_exceeded")


async def test_paths_and_methods(router: Router) -> None:
    assert_refused(await router.client.get("/v1/nothing"), 404, code="not_found")
    assert_refused(await router.client.get("/v1/chat/completions"), 405, code="method_not_allowed")
    assert_refused(await router.client.get("/v1/models/gpt-9"), 404, "model", "model_not_found")
    assert (await router.client.get("/docs")).status_code == 404


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "; did you mean /v1/chat/completions?"),
        ("/v1/v1/messages", "; did you mean /v1/messages?"),
        ("/v1/completions/", "; did you mean /v1/completions?"),
        ("/v1/health", "; did you mean /health?"),
        ("/v1", "."),
        ("/%7Bx%7D", "."),
    ],
)
async def test_a_path_with_a_part_too_many_or_too_few_is_answered_with_the_right_one(
    router: Router, path: str, meant: str
) -> None:
    reply = await router.client.post(path, json={})
    assert_refused(reply, 404, code="not_found")
    assert reply.json()["error"]["message"].endswith(meant)


async def test_neither_a_start_nor_an_unknown_path_makes_the_description(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FastAPI, "openapi", None)
    async with running_router(says("ok")) as router:
        reply = await router.client.post("/chat/completions", json={})
        assert_refused(reply, 404, code="not_found")


async def test_a_declared_body_over_the_limit_is_refused_before_it_is_read(router: Router) -> None:
    def send_head() -> bytes:
        with raw_connection(router.port) as connection:
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                b"Content-Length: 50000000\r\n\r\n"
            )
            return connection.recv(65536)

    assert (await asyncio.to_thread(send_head)).startswith(b"HTTP/1.1 413 ")


async def test_an_undeclared_body_over_the_limit_is_refused(router: Router) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(50):
            yield b"{" * 100_000

    reply = await router.client.post("/v1/completions", content=pieces(), headers={"content-type": "application/json"})
    assert_refused(reply, 413, code="payload_too_large")


async def test_a_prompt_above_the_queue_s_limit_is_refused_and_streams_go_on() -> None:
    card = make_card(context=1_000_000)
    async with running_router(says("abcdefghij", pause_s=0.05), card=card) as router:
        streams = [
            asyncio.create_task(
                router.client.post("/v1/completions", json={"model": MODEL, "prompt": "x", "stream": True})
            )
            for _ in range(10)
        ]
        await asyncio.sleep(0.1)
        big = await router.client.post("/v1/completions", json={"model": MODEL, "prompt": [1] * 300_000})
        assert_refused(big, 413, code="payload_too_large")
        for reply in await asyncio.gather(*streams):
            assert reply.text.endswith("data: [DONE]\n\n") and "error" not in reply.text
        assert len(router.worker.requests) == 10


@pytest.mark.parametrize("stream", [False, True])
async def test_what_no_message_inside_could_carry_is_refused_before_it_is_queued(stream: bool) -> None:
    """Prompt and answer travel together when a request changes hands: 186,000 tokens at 1 MiB."""
    async with running_router(says("ok"), card=make_card(context=1_000_000)) as router:
        body = {"model": MODEL, "prompt": [1] * 1000, "max_tokens": 186_000, "stream": stream}
        assert_refused(await router.client.post("/v1/completions", json=body), 413, code="payload_too_large")
        assert router.worker.requests == []
        body["max_tokens"] = 185_000
        assert (await router.client.post("/v1/completions", json=body)).status_code == 200
        chat = {"model": MODEL, "messages": MESSAGES, "stream": stream}
        assert (await router.client.post("/v1/chat/completions", json=chat)).status_code == 200
        assert all(largest_message(request) <= router.bus.max_payload for request in router.worker.requests)
        assert router.worker.requests[-1].stop.max_tokens > 180_000


async def test_too_many_and_too_large_headers() -> None:
    def send(head: bytes, port: int) -> bytes:
        with raw_connection(port) as connection:
            connection.sendall(head)
            return connection.recv(65536)

    async with running_router(says("ok")) as router:
        many = b"GET /live HTTP/1.1\r\n" + b"".join(b"h%d: x\r\n" % i for i in range(101)) + b"\r\n"
        large = b"GET /live HTTP/1.1\r\nh: " + b"x" * 400_000
        in_one_piece = b"GET /live HTTP/1.1\r\nh: " + b"x" * 70_000 + b"\r\n\r\n"
        endless_path = b"GET /" + b"x" * 400_000
        for head, status in ((many, 431), (large, 431), (in_one_piece, 431), (endless_path, 414)):
            answer = await asyncio.to_thread(send, head, router.port)
            assert answer.startswith(b"HTTP/1.1 %d " % status), answer[:100]
        assert (await router.client.get("/live")).status_code == 200


@pytest.mark.parametrize(
    "ending", [b"0\r\n" + b"t: " + b"x" * 400_000, b"5;x=" + b"x" * 400_000], ids=["trailer", "chunk"]
)
async def test_what_stands_around_the_pieces_of_a_body_is_bounded(ending: bytes) -> None:
    def send(port: int) -> bytes:
        with raw_connection(port) as connection:
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n" + ending
            )
            return connection.recv(65536)

    async with running_router(says("ok")) as router:
        assert (await asyncio.to_thread(send, router.port)).startswith(b"HTTP/1.1 431 ")


async def test_trailers_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[int] = []
    complete = BoundedHttpProtocol.on_message_complete

    def on_message_complete(self: BoundedHttpProtocol) -> None:
        kept.append(len(self.headers))
        complete(self)

    monkeypatch.setattr(BoundedHttpProtocol, "on_message_complete", on_message_complete)
    body = json.dumps({"model": MODEL, "prompt": "a"}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    trailers = b"".join(b"t%d: x\r\n" % i for i in range(500))

    def send(port: int) -> bytes:
        with raw_connection(port) as connection:
            connection.sendall(head + b"%x\r\n" % len(body) + body + b"\r\n0\r\n" + trailers + b"\r\n")
            return connection.recv(65536)

    async with running_router(says("ok")) as router:
        assert (await asyncio.to_thread(send, router.port)).startswith(b"HTTP/1.1 200 ")
    assert 3 in kept and max(kept) < 20  # also those of the usual client


@pytest.mark.parametrize("name", ["self", "args", "value", "range", "loop"])
async def test_a_template_variable_of_any_name_is_no_server_error(name: str) -> None:
    async with running_router(says("ok")) as router:
        body = {"model": MODEL, "messages": MESSAGES, "chat_template_kwargs": {name: 1}}
        assert (await router.client.post("/v1/chat/completions", json=body)).status_code == 200


async def test_unknown_paths_are_not_found_whatever_the_host_is_called() -> None:
    def send(head: bytes, port: int) -> bytes:
        with raw_connection(port) as connection:
            connection.sendall(head)
            return connection.recv(65536)

    async with running_router(says("ok")) as router:
        for path, host in ((b"/nope", b"[::1]:8000"), (b"/live/", b"localhost"), (b"/v1/completions/", b"x")):
            answer = await asyncio.to_thread(send, b"GET %s HTTP/1.1\r\nHost: %s\r\n\r\n" % (path, host), router.port)
            assert answer.startswith(b"HTTP/1.1 404 "), answer
            assert b"location" not in answer.lower()


async def test_what_is_no_http() -> None:
    def send(data: bytes, port: int) -> bytes:
        with raw_connection(port) as connection:
            connection.sendall(data)
            return connection.recv(65536)

    async with running_router(says("ok")) as router:
        smuggled = (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
        )
        for data in (b"\x16\x03\x01\x02\x00\x01\x00", b"hello\r\n\r\n", smuggled):
            answer = await asyncio.to_thread(send, data, router.port)
            assert answer.startswith(b"HTTP/1.1 400 ")
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"
        assert router.worker.requests == []


async def test_slow_heads_and_slow_bodies_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace_router.http_protocol.HEAD_TIMEOUT_S", 0.3)

    def send(data: bytes, port: int) -> bytes:
        with raw_connection(port) as connection:
            connection.sendall(data)
            return connection.recv(65536)

    settings = RouterSettings(port=0, drain_delay_s=0.0, body_timeout_s=0.3)
    async with running_router(says("ok"), settings=settings) as router:
        assert await asyncio.to_thread(send, b"GET /live HTTP/1.1\r\nHost: ", router.port) == b""
        slow = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"
        assert (await asyncio.to_thread(send, slow, router.port)).startswith(b"HTTP/1.1 408 ")


async def test_a_template_s_refusal_is_told_in_its_own_words() -> None:
    source = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('No system turn, please.') }}{% endif %}"
        "{% for message in messages %}{% if not loop.first and message.role == messages[loop.index0 - 1].role %}"
        "{{ raise_exception('Roles must alternate.') }}{% endif %}{% endfor %}"
    ) + CHATML
    refused: list[tuple[list[dict[str, str]], str]] = [
        ([{"role": "system", "content": "x"}, *MESSAGES], "No system turn, please."),
        (MESSAGES * 2, "Roles must alternate."),
    ]
    async with running_router(says("ok"), card=make_card(chat_template=source)) as router:
        for stream in (False, True):
            for messages, sentence in refused:
                body = {"model": MODEL, "messages": messages, "stream": stream}
                reply = await router.client.post("/v1/chat/completions", json=body)
                assert reply.headers["content-type"] == "application/json"
                assert_refused(reply, 400, "messages", "template_error")
                assert reply.json()["error"]["message"] == sentence
            none: dict[str, Any] = {"model": MODEL, "messages": [], "stream": stream}
            assert_refused(await router.client.post("/v1/chat/completions", json=none), 400, "messages")
        assert router.worker.requests == []


async def test_a_model_without_template_has_no_chat() -> None:
    async with running_router(says("ok"), card=make_card(chat_template=None)) as router:
        reply = await router.client.post("/v1/chat/completions", json={"model": MODEL, "messages": MESSAGES})
        assert_refused(reply, 400, "model", "model_has_no_chat_template")


async def test_an_empty_prompt_starts_from_the_beginning_of_text_token() -> None:
    async with running_router(says("ok"), card=make_card(adds_bos=True, bos_token="<|endoftext|>")) as router:
        for prompt in ("", [""]):
            reply = await router.client.post("/v1/completions", json={"model": MODEL, "prompt": prompt})
            assert reply.json()["usage"]["prompt_tokens"] == 1
        empty: list[Any] = [[], [[]]]
        for bad in empty:
            reply = await router.client.post("/v1/completions", json={"model": MODEL, "prompt": bad})
            assert_refused(reply, 400, "prompt")


async def test_whether_a_prompt_begins_with_the_beginning_of_text_token_is_the_clients_choice() -> None:
    card = make_card(adds_bos=True, bos_token="<|endoftext|>")
    async with running_router(says("ok"), card=card) as router:
        (bos,) = await prompt_ids(router, "/v1/completions", prompt="")
        for path, fields, default in (
            ("/v1/completions", {"prompt": "abc"}, True),
            ("/v1/chat/completions", {"messages": MESSAGES}, False),
        ):
            begins = [
                (await prompt_ids(router, path, **fields, add_special_tokens=wish))[0] == bos
                for wish in (None, True, False)
            ]
            assert begins == [default, True, False], path
        nothing = {"model": MODEL, "prompt": "", "add_special_tokens": False}
        assert_refused(await router.client.post("/v1/completions", json=nothing), 400, "prompt")


async def prompt_ids(router: Router, path: str, **fields: Any) -> list[int]:
    reply = await router.client.post(path, json={"model": MODEL, **fields})
    assert reply.status_code == 200, reply.text
    return prompt_of(router.worker.requests[-1])


async def test_request_ids_are_ours_and_a_harmless_one_is_echoed() -> None:
    async with running_router(says("ok")) as router:
        body = {"model": MODEL, "prompt": "a"}
        both = await asyncio.gather(
            *(router.client.post("/v1/completions", json=body, headers={"x-request-id": "order-7"}) for _ in range(2))
        )
        assert [reply.headers["x-request-id"] for reply in both] == ["order-7", "order-7"]
        assert all(reply.json()["choices"][0]["text"] == "ok" for reply in both)
        ids = {request.request_id for request in router.worker.requests}
        assert len(ids) == 2 and all(len(request_id) == 32 for request_id in ids)
        for bad in ("a b", ">", "*", "x" * 129, "a\tb"):
            reply = await router.client.post("/v1/completions", json=body, headers={"x-request-id": bad})
            assert reply.headers["x-request-id"] in {request.request_id for request in router.worker.requests}
        bad_body = await router.client.post("/v1/completions", content=json.dumps({"model": MODEL}).encode())
        assert len(bad_body.headers["x-request-id"]) == 32
