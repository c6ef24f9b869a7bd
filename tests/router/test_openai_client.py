"""What OpenAI's own client makes of refusals, failures and time-outs, and what it shows of our headers."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from headrace_router.settings import RouterSettings
from headrace_shared.messages import FinishReason, Outcome, Request
from tests.byte_model import MODEL, byte_ids
from tests.router.keys import add_key, strict_router, until_known
from tests.router.support import Router, ScriptedWorker, running_router, says, until

HI: Any = [{"role": "user", "content": "Hi"}]
PATIENCE_S = 1.0


def url(router: Router) -> str:
    return f"http://127.0.0.1:{router.port}/v1"


@contextlib.asynccontextmanager
async def asking(router: Router, **settings: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    given: dict[str, Any] = {"base_url": url(router), "api_key": "none", "max_retries": 0}
    async with openai.AsyncOpenAI(**given | settings) as client:
        yield client


@pytest.fixture
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace_router.admission.retry_after", lambda seconds: PATIENCE_S)


@pytest.mark.usefixtures("short_patience")
async def test_who_is_refused_for_too_many_calls_comes_back_when_told_to() -> None:
    settings = RouterSettings(port=0, drain_delay_s=0.0, max_inflight=1)
    async with running_router(says("okay", pause_s=0.1), settings=settings) as router, asking(router) as client:
        first = asyncio.create_task(client.completions.create(model=MODEL, prompt="a"))
        await until(lambda: bool(router.worker.requests))
        with pytest.raises(openai.RateLimitError) as caught:
            await client.completions.create(model=MODEL, prompt="a")
        assert caught.value.code == "queue_full" and caught.value.response.headers["retry-after"] == "1"
        began_at = time.monotonic()
        again = await client.with_options(max_retries=2).completions.create(model=MODEL, prompt="a")
        assert again.choices[0].text == "okay" and time.monotonic() - began_at >= PATIENCE_S
        assert (await first).choices[0].text == "okay"
        assert "headrace_client_retries_total 1.0" in (await router.client.get("/metrics")).text


@pytest.mark.usefixtures("short_patience")
async def test_who_is_refused_while_the_queue_is_away_comes_back_when_told_to() -> None:
    settings = RouterSettings(port=0, drain_delay_s=0.0, publish_timeout_s=0.3)
    async with running_router(says("ok"), settings=settings) as router, asking(router, max_retries=2) as client:
        router.broker.stop()
        await asyncio.sleep(0.35)
        with pytest.raises(openai.InternalServerError) as caught:
            await client.with_options(max_retries=0).completions.create(model=MODEL, prompt="a")
        assert caught.value.status_code == 503 and caught.value.type == "service_unavailable"
        asyncio.get_running_loop().call_later(0.4, router.broker.start)
        began_at = time.monotonic()
        answer = await client.completions.create(model=MODEL, prompt="a")
        assert answer.choices[0].text == "ok" and time.monotonic() - began_at >= PATIENCE_S


async def test_what_would_fail_again_is_not_tried_again() -> None:
    """The client tries any 408 and 500 three times if it is left alone."""

    async def script(worker: ScriptedWorker, request: Request) -> None:
        await worker.end(request, Outcome.FAILED, "request_quarantined", "It has ended workers.")

    async with running_router(script) as router, asking(router, max_retries=2) as client:
        with pytest.raises(openai.InternalServerError) as caught:
            await client.completions.create(model=MODEL, prompt="a")
        assert caught.value.code == "request_quarantined"
        with pytest.raises(openai.BadRequestError):
            await client.completions.create(model=MODEL, prompt="")
        assert len(router.worker.requests) == 1


async def test_every_refusal_is_an_error_of_its_own_class() -> None:
    async with strict_router(says("ok")) as router, asking(router) as stranger:
        key = await add_key(router.bus)
        await until_known(router, key)
        with pytest.raises(openai.AuthenticationError) as caught:
            await stranger.models.list()
        assert caught.value.code == "invalid_api_key" and caught.value.request_id is not None
        async with asking(router, api_key=key["Authorization"].removeprefix("Bearer ")) as client:
            cases: list[tuple[type[openai.APIStatusError], dict[str, Any], str, str | None]] = [
                (openai.NotFoundError, {"model": "gpt-9"}, "model_not_found", "model"),
                (openai.BadRequestError, {"max_tokens": 0}, "invalid_value", "max_tokens"),
                (openai.BadRequestError, {"max_tokens": 10_000}, "context_length_exceeded", "max_tokens"),
                (openai.BadRequestError, {"messages": []}, "", "messages"),
                (openai.BadRequestError, {"extra_body": {"suffix": 5}}, "", "suffix"),
            ]
            for kind, fields, code, param in cases:
                for stream in (False, True):
                    asked: dict[str, Any] = {"model": MODEL, "messages": HI, "stream": stream}
                    with pytest.raises(kind) as refused:
                        await client.chat.completions.create(**asked | fields)
                    error = refused.value
                    assert error.type == "invalid_request_error" and error.param == param
                    assert error.code == code or (not code and error.code)
                    assert error.request_id == error.response.headers["x-request-id"]


async def test_a_stream_that_fails_raises_after_what_came() -> None:
    async def script(worker: ScriptedWorker, request: Request) -> None:
        worker.frame(request, byte_ids("ab"), 0)
        await worker.end(request, Outcome.FAILED, "engine_error", "It did not work.")

    def read_all(base_url: str) -> tuple[str, openai.APIError]:
        text = ""
        with openai.OpenAI(base_url=base_url, api_key="none") as client, pytest.raises(openai.APIError) as caught:
            for chunk in client.chat.completions.create(model=MODEL, messages=HI, stream=True):
                text += chunk.choices[0].delta.content or ""
        return text, caught.value

    async with running_router(script) as router, asking(router) as client:
        text, error = await asyncio.to_thread(read_all, url(router))
        assert text == "ab" and error.message == "It did not work."
        assert (error.type, error.code) == ("server_error", "engine_error")
        with pytest.raises(openai.APIError, match="It did not work"):
            async for _ in await client.completions.create(model=MODEL, prompt="a", stream=True):
                pass


async def test_a_client_that_gives_up_is_gone() -> None:
    async def script(worker: ScriptedWorker, request: Request) -> None:
        await asyncio.sleep(100)

    async with running_router(script) as router, asking(router, timeout=0.3) as client:
        for stream in (False, True):
            with pytest.raises(openai.APITimeoutError):
                answer: Any = await client.chat.completions.create(model=MODEL, messages=HI, stream=stream)
                async for _ in answer:
                    pass
        await until(lambda: len(router.worker.cancels) == 2)


@pytest.mark.parametrize("resumable", ["true", "false"])
async def test_a_client_with_little_patience_is_kept_in_each_silence(resumable: str) -> None:
    """Time-outs are about the time between bytes. With ids, the client takes any blank line for an event."""

    async def script(worker: ScriptedWorker, request: Request) -> None:
        for i, token in enumerate(byte_ids("ok")):
            await asyncio.sleep(1.3)
            worker.frame(request, [token], i, finish=FinishReason.LENGTH if i else None)

    settings = RouterSettings(port=0, drain_delay_s=0.0, ping_interval_s=0.2)
    async with running_router(script, settings=settings) as router, asking(router, timeout=1.0) as client:
        headers = {"Headrace-Resumable": resumable}
        stream = await client.chat.completions.create(model=MODEL, messages=HI, stream=True, extra_headers=headers)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "ok"


async def test_headers_are_shown() -> None:
    async with running_router(says("ok")) as router, asking(router) as client:
        raw = await client.chat.completions.with_raw_response.create(model=MODEL, messages=HI)
        answer = raw.parse()
        assert answer.choices[0].message.content == "ok"
        assert answer._request_id == raw.request_id == raw.headers["x-request-id"]
        assert answer.id == f"chatcmpl-{raw.request_id}"
        assert int(raw.headers["openai-processing-ms"]) >= 0
        listed = await client.models.with_raw_response.list()
        assert listed.headers["x-request-id"] and int(listed.headers["openai-processing-ms"]) >= 0
        async with client.chat.completions.with_streaming_response.create(
            model=MODEL, messages=HI, stream=True, extra_headers={"X-Request-Id": "mine"}
        ) as reply:
            assert reply.headers["x-request-id"] == "mine" and reply.headers["openai-processing-ms"]
            lines = [line async for line in reply.iter_lines()]
        assert lines[-2:] == ["data: [DONE]", ""] or lines[-1] == "data: [DONE]"
