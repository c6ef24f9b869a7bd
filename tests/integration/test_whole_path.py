"""Router, scheduler and worker as processes on a broker, one of which fails."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import httpx
import pytest

from headrace_shared.broker import NatsServer
from tests.e2e.api import CHAT, TEXT, WAYS, Answer, ask, body_of
from tests.integration.deployment import MODEL, Client, Deployment, status_of, until_empty, until_status
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.nats

ENGINE = "tests.scripted_text"
TIME_S = 8.0


class System(NamedTuple):
    deployment: Deployment
    api: httpx.AsyncClient

    async def ask(self, path: str, prompt: Any, stream: bool = False, **fields: Any) -> Answer:
        return await ask(self.api, path, prompt, stream, model=MODEL, **fields)


@asynccontextmanager
async def started(deployment: Deployment, **settings: Any) -> AsyncIterator[System]:
    """A router and a scheduler; tests add the workers they want."""
    url, _ = await asyncio.gather(deployment.router(**settings), deployment.scheduler())
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, limits=limits, trust_env=False) as api:
        yield System(deployment, api)


@pytest.fixture
async def system(deployment: Deployment) -> AsyncIterator[System]:
    """It is impatient with the broker."""
    async with started(deployment, ping_interval_s=0.5, publish_timeout_s=2) as system:
        yield system


async def ready(system: System, **settings: Any) -> None:
    await system.deployment.worker(engine=ENGINE, **settings)
    await until_status(system.api, "/health", 200)


@pytest.mark.parametrize("mishap", ["the worker raises", "SIGKILL", "SIGSTOP"])
async def test_a_cut_answer_never_looks_whole(system: System, client: Client, mishap: str) -> None:
    """With no other worker to go on: an error when its time is up, then the end of the stream."""
    await ready(system, step_s=0.02)
    headers = {"Headrace-Timeout": str(TIME_S)}
    script: dict[str, Any] = {"echo": "abc"}
    if mishap == "the worker raises":
        script["fail_at"] = 10

    async def stream(path: str) -> Answer:
        return await system.ask(path, script, True, max_tokens=3000, headers=headers)

    async def whole(path: str) -> httpx.Response:
        body = body_of(path, script, model=MODEL, max_tokens=3000)
        return await system.api.post(path, json=body, headers=headers)

    streams = [asyncio.create_task(stream(path)) for path in (CHAT, TEXT)]
    answer = asyncio.create_task(whole(TEXT))
    await asyncio.sleep(0.8)
    if mishap != "the worker raises":
        number = signal.Signals[mishap]
        system.deployment.signal("worker-1", number)
    async with asyncio.timeout(TIME_S + PATIENCE_S):
        cut = await asyncio.gather(*streams)
        refused = await answer
    for told in cut:
        assert told.error is not None and told.num_done == 1
        assert {"message", "type", "param", "code", "request_id"} <= set(told.error)
        assert all(choice.finish is None for choice in told.choices.values())
        assert 5 < len(told.text) < 1000 and told.text == ("abc" * 1000)[: len(told.text)]
        assert told.error["request_id"] in system.deployment.log("router-1")
    assert refused.json()["error"]["type"] == {408: "timeout", 500: "server_error"}[refused.status_code]
    metrics = (await system.api.get("/metrics")).text
    code = cut[0].error["code"] if cut[0].error else ""
    assert f'outcome="{code}"}} 3.0' in metrics and 'outcome="finished"' not in metrics
    if mishap == "SIGSTOP":
        system.deployment.signal("worker-1", signal.SIGCONT)
    await until_empty(client)


async def test_the_broker_restarts_under_the_whole_system(system: System, nats_server: NatsServer) -> None:
    """While all are idle, and with streams running; with the broker away, refusals are quick."""
    await ready(system, step_s=0.01)
    await nats_server.stop()
    await until_status(system.api, "/health", 503)
    await asyncio.sleep(2.0)  # longer than publish-timeout: nobody is let in to wait any more
    async with asyncio.timeout(10.0):
        reply = await system.api.post(TEXT, json=body_of(TEXT, {"text": "ok"}, model=MODEL))
    assert reply.status_code == 503 and int(reply.headers["retry-after"]) >= 1
    await asyncio.sleep(4.0)  # longer than a lease
    await nats_server.start()
    await until_status(system.api, "/health", 200)
    async with asyncio.timeout(PATIENCE_S):
        assert (await system.ask(TEXT, {"text": "back"})).text == "back"

    streams = [asyncio.create_task(system.ask(path, {"echo": "abcd"}, stream, max_tokens=400)) for path, stream in WAYS]
    await asyncio.sleep(1.0)
    await nats_server.stop()
    await nats_server.start()
    async with asyncio.timeout(PATIENCE_S):
        answers = await asyncio.gather(*streams)
    for answer in answers:  # it resumes, or ends with an error event
        assert answer.error is not None or answer.outcome() == {0: ("abcd" * 100, "length")}
    assert any(answer.error is None for answer in answers)


@pytest.fixture
async def patient_system(deployment: Deployment) -> AsyncIterator[System]:
    """It refuses nobody for what a wait is expected to be: of an engine that takes as long for one token of a prompt as
    for thousands it expects too much."""
    async with started(deployment, max_wait_s=86_400, request_timeout_s=86_400) as system:
        yield system


async def test_large_messages_cost_nobody_else(patient_system: System) -> None:
    """The broker takes messages of 1 MiB."""
    system = patient_system
    await ready(system, num_blocks=16_384, context=262_144, tokens_per_iteration=65_536, checks=False, step_s=0.01)
    streams = [
        asyncio.create_task(system.ask(path, {"echo": "abcd"}, True, max_tokens=400)) for path in (CHAT, TEXT) * 5
    ]
    await asyncio.sleep(0.5)
    for path, stream in WAYS:
        big = body_of(path, "x" * 1_500_000, stream, model=MODEL, max_tokens=5)
        refused = await system.api.post(path, json=big)
        assert refused.status_code in (400, 413), refused.text
        assert refused.json()["error"]["type"] == "invalid_request_error"
    # At the limit: prompt and answer of 186,000 tokens can just be carried; headers count too.
    script = '{"text": "ok"}'
    headers = {"traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01", "tracestate": "x=" + "y" * 500}
    sizes = {}
    for size in (185_000, 185_600, 186_000, 186_400, 187_000):
        body = body_of(TEXT, script.rjust(size, "x"), model=MODEL, max_tokens=100)
        reply = await system.api.post(TEXT, json=body, headers=headers)
        sizes[size] = reply.status_code
        assert reply.status_code in (200, 413), reply.text
        if reply.status_code == 200:
            assert reply.json()["choices"][0]["text"] == "ok"
    assert sizes[185_000] == 200 and sizes[187_000] == 413 and set(sizes.values()) == {200, 413}, sizes
    long = await system.ask(CHAT, {"echo": "abcd"}, max_tokens=1000, logprobs=True, top_logprobs=20)
    assert len(long.choices[0].logprobs) == 1000
    assert all(len(token["top_logprobs"]) == 20 for token in long.choices[0].logprobs)
    for answer in await asyncio.gather(*streams):
        assert answer.error is None and answer.outcome() == {0: ("abcd" * 100, "length")}


async def test_every_length_runs_or_is_refused_at_once(system: System, client: Client) -> None:
    """8 blocks of 16 tokens, a model context of 4096. Router and scheduler agree: prompt + answer <= 128."""
    await ready(system, num_blocks=8, context=4096, step_s=0.005)
    script, short = '{"echo": "ab"}', {"text": "ok"}
    for length in (100, 111, 112, 119, 120, 121, 127, 128, 129, 500):
        for path, stream in WAYS[2:]:
            body = body_of(path, script.rjust(length, "x"), stream, model=MODEL, max_tokens=8)
            long = asyncio.create_task(system.api.post(path, json=body))
            async with asyncio.timeout(PATIENCE_S):
                assert (await system.ask(TEXT, short, max_tokens=8)).text == "ok"
                reply = await long
            if length + 8 <= 128:
                assert reply.status_code == 200 and (stream or reply.json()["choices"][0]["text"] == "abababab")
            else:
                assert reply.status_code == 400
                assert reply.json()["error"]["code"] == "context_length_exceeded"
    for length in (100, 119):
        left = asyncio.create_task(
            system.api.post(TEXT, json=body_of(TEXT, script.rjust(length, "x"), model=MODEL, max_tokens=128 - length))
        )
        await asyncio.sleep(0.03)
        left.cancel()
        assert (await system.ask(TEXT, short, max_tokens=8)).text == "ok"
    await until_empty(client)


async def test_a_model_without_workers_is_woken_by_its_requests(system: System, client: Client) -> None:
    """The card outlives the worker, so a fresh router knows the model; what it does not know is a 404."""
    await ready(system)
    assert await system.deployment.stop("worker-1") == 0
    url = await system.deployment.router("router-2", ping_interval_s=0.5)
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as fresh:
        await until_status(fresh, "/live", 200)
        for _ in range(1200):
            if listing := (await fresh.get("/v1/models")).json()["data"]:
                break
            await asyncio.sleep(0.05)
        assert [model["id"] for model in listing] == [MODEL]
        assert await status_of(fresh, "/health") == 503
        unknown = await fresh.post(TEXT, json=body_of(TEXT, "x", model="gpt-9"))
        assert unknown.status_code == 404 and unknown.json()["error"]["code"] == "model_not_found"
        whole = asyncio.create_task(ask(fresh, CHAT, {"text": "awake"}, model=MODEL))
        pings = 0
        body = body_of(CHAT, {"text": "awake"}, True, model=MODEL)
        async with fresh.stream("POST", CHAT, json=body, headers={"User-Agent": "curl/8"}) as reply:
            assert reply.status_code == 200
            text = ""
            async for line in reply.aiter_lines():
                pings += line.startswith(":")
                if pings == 4:
                    pings += 1
                    assert await client.num_queued() == 2
                    await system.deployment.worker("worker-2", engine=ENGINE)
                if line.startswith("data: {") and (choices := json.loads(line[6:])["choices"]):
                    text += choices[0]["delta"].get("content", "")
        assert pings >= 5 and text == "awake"
        assert (await whole).text == "awake"
