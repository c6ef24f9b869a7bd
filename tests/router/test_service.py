"""The process: health, models, drain, and what the openai client makes of it."""

import asyncio
import contextlib
import json
import re
import socket
import time

import openai
import pytest

from headrace_router.capacities import Capacities
from headrace_router.models import Models
from headrace_router.settings import RouterSettings
from headrace_router.tokenization import TextEncoder
from headrace_router.web_server import listen
from headrace_shared.errors import ConfigError, ProtocolError
from headrace_shared.fleet_messages import ModelCard
from headrace_shared.memory_bus import MemoryBus
from headrace_shared.model_cards import store_card
from tests.byte_model import CONTEXT, MODEL, make_card
from tests.router.support import running_router, says, sse_events, until


async def test_health_follows_the_workers() -> None:
    async with running_router(says("ok"), has_worker=False) as router:
        reply = await router.client.get("/health")
        assert reply.status_code == 503
        assert reply.json()["reason"] == "no worker is ready"
        assert (await router.client.get("/live")).status_code == 200
    async with running_router(says("ok")) as router:
        await asyncio.sleep(0.2)
        assert (await router.client.get("/health")).json() == {"status": "ready", "workers": 1}


async def test_a_worker_whose_model_is_not_known_yet_makes_nothing_ready() -> None:
    """A worker may be heard of before its card is read: whoever asks then would get a 503."""
    async with running_router(says("ok")) as router:
        models = Models(time.monotonic, Capacities())
        following = asyncio.create_task(models.follow(MemoryBus(router.broker), build=_never_built))
        await asyncio.sleep(0.3)
        assert models.all() == [] and models.num_ready_workers() == 0
        models.add(make_card(), TextEncoder(make_card()))
        assert models.num_ready_workers() == 1
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def test_the_door_opens_when_the_cards_that_are_there_have_been_read() -> None:
    """A router that is started again would otherwise tell its first callers that there is no model."""
    bus = MemoryBus()
    await store_card(bus, make_card())
    is_built = asyncio.Event()

    async def build_slowly(card: ModelCard) -> TextEncoder:
        await is_built.wait()
        return TextEncoder(card)

    models = Models(time.monotonic, Capacities())
    following = asyncio.create_task(models.follow(bus, build=build_slowly))
    await models.first_read(0.2)
    assert models.all() == []
    is_built.set()
    await models.first_read(10.0)
    assert [model.card.model for model in models.all()] == [MODEL]
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


async def test_without_any_card_the_door_opens_at_once() -> None:
    models = Models(time.monotonic, Capacities())
    following = asyncio.create_task(models.follow(MemoryBus(), _never_built))
    async with asyncio.timeout(5.0):
        await models.first_read(60.0)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


async def _never_built(card: ModelCard) -> TextEncoder:
    raise ProtocolError("the tokenizer cannot be read")


async def test_models_are_listed_without_workers_and_their_requests_wait() -> None:
    async with running_router(says("ok"), has_worker=False) as router:
        listing = (await router.client.get("/v1/models")).json()
        assert listing["object"] == "list"
        [model] = listing["data"]
        assert (model["id"], model["object"], model["owned_by"]) == (MODEL, "model", "headrace")
        assert model["max_model_len"] == CONTEXT and model["created"] == 1_700_000_000
        assert model["default_parameters"] == {}
        assert (await router.client.get(f"/v1/models/{MODEL}")).json() == model
        waiting = asyncio.create_task(router.client.post("/v1/completions", json={"model": MODEL, "prompt": "a"}))
        await until(lambda: len(router.broker.streams["REQUESTS"].stored) == 1)
        working = asyncio.create_task(router.worker.run())
        assert (await waiting).json()["choices"][0]["text"] == "ok"
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)


async def test_a_model_with_a_slash_and_a_new_card() -> None:
    async with running_router(says("ok"), card=make_card(model="org/Model-1.5B")) as router:
        assert (await router.client.get("/v1/models/org/Model-1.5B")).json()["id"] == "org/Model-1.5B"
        body = {"model": "org/Model-1.5B", "prompt": "a"}
        assert (await router.client.post("/v1/completions", json=body)).status_code == 200
        await store_card(router.bus, make_card(model="org/Model-1.5B", context=100))
        for _ in range(3000):
            if (await router.client.get("/v1/models/org/Model-1.5B")).json()["max_model_len"] == 100:
                break
            await asyncio.sleep(0.02)
        else:
            raise AssertionError("the new card never came")


async def test_a_broken_card_does_not_disturb_the_others() -> None:
    async with running_router(says("ok")) as router:
        await store_card(router.bus, make_card(model="broken", tokenizer=b"{}"))
        await store_card(router.bus, make_card(model="other"))
        for _ in range(3000):
            ids = [model["id"] for model in (await router.client.get("/v1/models")).json()["data"]]
            if "other" in ids:
                break
            await asyncio.sleep(0.02)
        assert ids == ["other", MODEL]


async def test_draining_lets_streams_finish() -> None:
    settings = RouterSettings(port=0, drain_delay_s=0.3, drain_timeout_s=10.0)
    async with running_router(says("abcdefghij", pause_s=0.1), settings=settings) as router:
        body = {"model": MODEL, "prompt": "a", "stream": True}
        running = asyncio.create_task(router.client.post("/v1/completions", json=body))
        await until(lambda: bool(router.worker.requests))
        router.service.drain()
        assert (await router.client.get("/health")).json()["reason"] == "draining"
        assert (await router.client.get("/live")).status_code == 200
        reply = await running
        assert sse_events(reply.text)[-1] == "[DONE]"
        assert "error" not in reply.text
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", router.port), timeout=1.0).close()


async def test_a_stream_that_outlives_the_drain_is_told() -> None:
    settings = RouterSettings(port=0, drain_delay_s=0.0, drain_timeout_s=3.0)
    async with running_router(says("a" * 200, pause_s=0.1), settings=settings) as router:
        body = {"model": MODEL, "prompt": "a", "stream": True, "max_tokens": 200}
        running = asyncio.create_task(router.client.post("/v1/completions", json=body))
        await until(lambda: bool(router.worker.requests))
        router.service.drain()
        events = sse_events((await running).text)
        assert events[-2]["error"]["code"] == "draining"
        await until(lambda: bool(router.worker.cancels))


async def test_the_openai_client() -> None:
    async with (
        running_router(says("Hello 🦉")) as router,
        openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{router.port}/v1", api_key="none", max_retries=0) as client,
    ):
        answer = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Hi"}], logprobs=True, top_logprobs=2
        )
        assert answer.choices[0].message.content == "Hello 🦉"
        assert answer.choices[0].logprobs is not None and answer.choices[0].logprobs.content is not None
        assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2
        text = ""
        async for chunk in await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Hi"}], stream=True
        ):
            text += chunk.choices[0].delta.content or ""
        assert text == "Hello 🦉"
        completion = await client.completions.create(model=MODEL, prompt=["a", "b"], n=2)
        assert [choice.text for choice in completion.choices] == ["Hello 🦉"] * 4
        assert [model.id async for model in client.models.list()] == [MODEL]
        with pytest.raises(openai.NotFoundError) as caught:
            await client.chat.completions.create(model="gpt-9", messages=[{"role": "user", "content": "Hi"}])
        assert caught.value.code == "model_not_found" and caught.value.param == "model"


async def test_tokenize_and_back() -> None:
    async with running_router(says("ok")) as router:
        reply = await router.client.post("/tokenize", json={"model": MODEL, "prompt": "the 🦉"})
        tokens = reply.json()["tokens"]
        assert reply.json() == {"count": len(tokens), "max_model_len": CONTEXT, "tokens": tokens}
        back = await router.client.post("/detokenize", json={"model": MODEL, "tokens": tokens})
        assert back.json() == {"prompt": "the 🦉"}
        assert (await router.client.get("/version")).json().keys() == {"version"}
        assert (await router.client.get("/load")).json() == {"server_load": 0}


async def test_the_openapi_document_has_no_dangling_references() -> None:
    async with running_router(says("ok")) as router:
        document = (await router.client.get("/openapi.json")).text
        names = set(json.loads(document)["components"]["schemas"])
        assert set(re.findall(r'"#/components/schemas/([^"]+)"', document)) <= names
        assert "ChatBody" in names
        assert (await router.client.head("/health")).status_code == 200


async def test_nothing_is_left_of_many_calls() -> None:
    async with running_router(says("abc")) as router:
        body = {"model": MODEL, "prompt": "a"}
        await router.client.post("/v1/completions", json=body)
        before = len(asyncio.all_tasks())
        num_subscriptions = len(router.broker.subscriptions)

        async def call(i: int) -> None:
            with contextlib.suppress(Exception):
                timeout = 0.001 if i % 7 == 0 else 20.0
                await router.client.post("/v1/completions", json={**body, "stream": i % 2 == 0}, timeout=timeout)

        for start in range(0, 200, 40):
            await asyncio.gather(*(call(start + i) for i in range(40)))
        await until(lambda: not router.broker.streams["REQUESTS"].stored)
        await asyncio.sleep(1.5)
        assert len(asyncio.all_tasks()) - before < 40 + 5  # idle connections of the client
        assert len(router.broker.subscriptions) <= num_subscriptions
        await router.client.aclose()


def test_a_taken_port_is_a_clear_error() -> None:
    first = listen("127.0.0.1", 0, 30.0)
    try:
        with pytest.raises(ConfigError, match="cannot listen on"):
            listen("127.0.0.1", first.getsockname()[1], 30.0)
    finally:
        first.close()
    with pytest.raises(ConfigError):
        listen("no.such.host.invalid", 1, 30.0)
