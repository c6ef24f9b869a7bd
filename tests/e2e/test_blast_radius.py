"""Requests that are refused harm nobody: what runs meanwhile gets the same tokens, to the last bit."""

import asyncio
import contextlib
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests import hostile
from tests.e2e.launcher import Launched, launched
from tests.patience import PATIENCE_S
from tests.router.raw_http import MALFORMED

pytestmark = [pytest.mark.model, pytest.mark.e2e, pytest.mark.nats, pytest.mark.timeout(600)]

MODEL = "smollm2-135m"
NUM_STREAMS = 16
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def deterministic(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    environment = {"HEADRACE_DETERMINISTIC": "true", "HEADRACE_DTYPE": "bfloat16", "HEADRACE_CONTEXT": "1024"}
    with launched(tmp_path_factory.mktemp("system"), "--no-autoscaler", environment=environment) as system:
        yield system


async def one_stream(client: httpx.AsyncClient, number: int) -> list[Any]:
    """Its tokens with their log-probabilities."""
    body = {
        "model": MODEL,
        "prompt": f"{number} bottles of",
        "max_tokens": NUM_TOKENS,
        "temperature": 1.0,
        "seed": number,
        "logprobs": 2,
        "ignore_eos": True,
        "stream": True,
    }
    told: list[Any] = []
    async with client.stream("POST", "/v1/completions", json=body) as reply:
        assert reply.status_code == 200, await reply.aread()
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                for choice in event["choices"]:
                    if choice["logprobs"] is not None:
                        told.append((choice["text"], choice["logprobs"]["token_logprobs"]))
    return told


async def all_streams(client: httpx.AsyncClient) -> list[list[Any]]:
    return await asyncio.gather(*(one_stream(client, number) for number in range(NUM_STREAMS)))


async def refused(client: httpx.AsyncClient, asked: hostile.Hostile) -> None:
    headers = {"content-type": "application/json"} | asked.headers
    try:
        reply = await client.post(asked.path, content=asked.body, headers=headers)
    except (httpx.WriteError, httpx.ReadError):
        return  # cut off while it was still sending
    assert 400 <= reply.status_code < 500, (asked.name, reply.status_code, reply.text[:300])
    error = reply.json()["error"]
    assert error["message"] and error["type"] and error["code"], asked.name
    for leak in ("Traceback", "headrace_", "/usr/", "/tmp/", ".py", "nats://"):
        assert leak not in reply.text, asked.name


async def malformed(port: int, data: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        with contextlib.suppress(ConnectionError):
            writer.write(data)
            assert (await asyncio.wait_for(reader.read(), PATIENCE_S)).startswith(b"HTTP/1.1 4")
    finally:
        writer.close()


async def all_refused(client: httpx.AsyncClient, port: int) -> int:
    """How many there were."""
    asked = list(hostile.requests(MODEL))
    for each in asked:
        await refused(client, each)
    for data in MALFORMED.values():
        await malformed(port, data)
    return len(asked) + len(MALFORMED)


async def test_tokens_of_others_are_the_same_bits(deterministic: Launched) -> None:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=deterministic.url, timeout=300, trust_env=False, limits=limits) as client:
        alone = await all_streams(client)
        assert all(len(told) >= NUM_TOKENS // 2 for told in alone)
        workers = [process["pid"] for process in deterministic.processes("worker")]
        barrage = asyncio.create_task(all_refused(client, deterministic.port))
        while not barrage.done():
            assert await all_streams(client) == alone
        assert await barrage > 100
        assert [process["pid"] for process in deterministic.processes("worker")] == workers
        assert (await client.get("/health")).status_code == 200
