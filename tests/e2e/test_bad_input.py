"""Bad input is the client's to mend: a 4xx that names the field, nothing in the queue, the workers untouched."""

import json
from typing import Any

import httpx
import pytest

from tests.e2e.broker_view import broker_view
from tests.e2e.launcher import Launched

pytestmark = [pytest.mark.model, pytest.mark.e2e, pytest.mark.nats]

CHAT: dict[str, Any] = {"model": "smollm2-135m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
TEXT: dict[str, Any] = {"model": "smollm2-135m", "prompt": "Hi", "max_tokens": 2}

BAD_CHATS: list[tuple[dict[str, Any], int, str]] = [
    ({"model": "no-such-model"}, 404, "model"),
    ({"model": 7}, 400, "model"),
    ({"messages": []}, 400, "messages"),
    ({"messages": "hello"}, 400, "messages"),
    ({"messages": [{"role": "king", "content": "Hi"}]}, 400, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "hologram"}]}]}, 400, "messages"),
    ({"max_tokens": -1}, 400, "max_tokens"),
    ({"max_tokens": 0}, 400, "max_tokens"),
    ({"max_tokens": "many"}, 400, "max_tokens"),
    ({"max_tokens": 2**63}, 400, "max_tokens"),
    ({"temperature": -0.1}, 400, "temperature"),
    ({"top_p": 1.5}, 400, "top_p"),
    ({"n": 0}, 400, "n"),
    ({"n": 10_000}, 400, "n"),
    ({"stop": ["x"] * 1000}, 400, "stop"),
    ({"logit_bias": {"49152": -100}}, 400, "logit_bias"),
    ({"logit_bias": {"-1": 5}}, 400, "logit_bias"),
    ({"logit_bias": {"abc": 1}}, 400, "logit_bias"),
    ({"logit_bias": {"5": 1000}}, 400, "logit_bias"),
    ({"top_logprobs": 3}, 400, "top_logprobs"),
    ({"stream_options": {"include_usage": True}}, 400, "stream_options"),
    ({"messages": [{"role": "user", "content": "word " * 3000}]}, 400, "messages"),
]
BAD_TEXTS: list[tuple[dict[str, Any], int, str]] = [
    ({"prompt": ""}, 400, "prompt"),
    ({"prompt": [""]}, 400, "prompt"),
    ({"prompt": []}, 400, "prompt"),
    ({"prompt": [-1]}, 400, "prompt"),
    ({"prompt": [49152]}, 400, "prompt"),
    ({"prompt": "word " * 3000}, 400, "prompt"),
    ({"prompt": [5] * 1020, "max_tokens": 5}, 400, "prompt"),
]


@pytest.fixture
async def client(system: Launched) -> Any:
    async with httpx.AsyncClient(base_url=system.url, timeout=30) as client:
        yield client


def check(response: httpx.Response, status: int, field: str | None) -> None:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    if field is not None:
        assert (error["param"] or "").split(".")[0].split("[")[0] == field, error


async def test_each_bad_request_is_refused_and_never_queued(system: Launched, client: httpx.AsyncClient) -> None:
    workers = [process["pid"] for process in system.processes("worker")]
    async with broker_view(system) as broker:
        before = await broker.num_ever_queued()
        for changes, status, field in BAD_CHATS:
            for stream in (False, True):
                if "stream_options" not in changes:
                    check(
                        await client.post("/v1/chat/completions", json=CHAT | changes | {"stream": stream}),
                        status,
                        field,
                    )
        check(await client.post("/v1/chat/completions", json=CHAT | {"stream_options": {}}), 400, "stream_options")
        for changes, status, field in BAD_TEXTS:
            check(await client.post("/v1/completions", json=TEXT | changes), status, field)
        check(await client.post("/v1/completions", content=b"{not json"), 400, None)
        check(await client.post("/v1/completions", content=b"[" * 10_000), 400, None)
        check(await client.post("/v1/completions", content=json.dumps([1]).encode()), 400, None)
        check(await client.get("/v1/nothing"), 404, None)
        check(await client.get("/v1/completions"), 405, None)
        assert await broker.num_ever_queued() == before
    answer = await client.post("/v1/chat/completions", json=CHAT)
    assert answer.status_code == 200
    assert [process["pid"] for process in system.processes("worker")] == workers


async def test_a_body_of_fifty_megabytes_is_refused_before_it_is_read(client: httpx.AsyncClient) -> None:
    async def endless() -> Any:
        yield b'{"prompt": "'
        for _ in range(50):
            yield b"x" * 1024 * 1024

    check(await client.post("/v1/completions", content=b"x" * 50 * 1024 * 1024), 413, None)
    try:
        response = await client.post("/v1/completions", content=endless())
    except httpx.WriteError:
        return  # the server closed the connection while we were still sending: refused as well
    check(response, 413, None)


async def test_context_length_is_exact(system: Launched, client: httpx.AsyncClient) -> None:
    context = 1024
    fits = await client.post("/v1/completions", json=TEXT | {"prompt": [5] * (context - 1), "max_tokens": 1})
    assert fits.status_code == 200
    assert fits.json()["choices"][0]["finish_reason"] == "length"
    assert fits.json()["usage"]["prompt_tokens"] == context - 1
    for num_prompt, num_new in ((context, 1), (context + 1, 1), (context - 10, 50)):
        for path, body in (
            ("/v1/completions", TEXT | {"prompt": [5] * num_prompt, "max_tokens": num_new}),
            ("/v1/completions", TEXT | {"prompt": [5] * num_prompt, "max_tokens": num_new, "stream": True}),
        ):
            refused = await client.post(path, json=body)
            check(refused, 400, "prompt")
            error = refused.json()["error"]
            assert error["code"] == "context_length_exceeded"
            for figure in (context, num_prompt, num_new):
                assert str(figure) in error["message"], error["message"]
