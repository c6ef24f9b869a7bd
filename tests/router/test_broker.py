"""The router on a real broker that is restarted, hangs and is away."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import httpx
import pytest

from headrace_router import streams
from headrace_router.settings import RouterSettings
from headrace_shared.broker import NatsServer
from headrace_shared.nats_bus import NatsBus
from headrace_shared.subjects import requests_stream
from tests.byte_model import MODEL
from tests.router.support import Router, Script, running_router, says, sse_events, until

pytestmark = pytest.mark.nats

BODY = {"model": MODEL, "prompt": "a", "max_tokens": 100}
QUICK = RouterSettings(port=0, drain_delay_s=0.0, publish_timeout_s=1.0, stall_timeout_s=5.0)


def fail(reason: str) -> Callable[[], None]:
    def raise_it() -> None:
        raise AssertionError(reason)

    return raise_it


@contextlib.asynccontextmanager
async def on_broker(server: NatsServer, script: Script) -> AsyncIterator[Router]:
    buses = [
        await NatsBus.connect(server.url, name=name, on_closed=fail("closed"), ping_interval_s=0.5)
        for name in ("router", "worker")
    ]
    async with running_router(script, settings=QUICK, buses=(buses[0], buses[1])) as router:
        router.worker.pull_timeout_s = 0.5
        yield router


async def test_whole_and_streamed(nats_server: NatsServer) -> None:
    async with on_broker(nats_server, says("Hello 🦉")) as router:
        reply = await router.client.post("/v1/completions", json=BODY)
        assert reply.json()["choices"][0]["text"] == "Hello 🦉"
        reply = await router.client.post("/v1/completions", json={**BODY, "stream": True})
        assert "".join(event["choices"][0]["text"] for event in sse_events(reply.text)[:-1]) == "Hello 🦉"
        await until_empty(router)


async def test_leaving_queued_and_running(nats_server: NatsServer) -> None:
    async with on_broker(nats_server, says("a" * 90, pause_s=0.1)) as router:
        with pytest.raises(httpx.ReadTimeout):
            await router.client.post("/v1/completions", json=BODY, timeout=0.5)
        await until(lambda: len(router.worker.cancels) == 1)
        await until_empty(router)
        router.worker.is_taking = False
        await asyncio.sleep(0.7)
        with pytest.raises(httpx.ReadTimeout):
            await router.client.post("/v1/completions", json=BODY, timeout=0.3)
        await until_empty(router)
        assert len(router.worker.requests) == 1


async def test_a_restart_between_requests(nats_server: NatsServer) -> None:
    async with on_broker(nats_server, says("ok")) as router:
        await nats_server.kill()
        await until(lambda: not router.bus.is_connected)
        await asyncio.sleep(1.0)
        reply = await asyncio.wait_for(router.client.post("/v1/completions", json=BODY), 2.0)
        assert reply.status_code == 503
        assert (await router.client.get("/health")).status_code == 503
        await nats_server.start()
        for _ in range(600):
            reply = await router.client.post("/v1/completions", json=BODY)
            if reply.status_code == 200:
                break
            await asyncio.sleep(0.1)
        assert reply.json()["choices"][0]["text"] == "ok"


async def test_a_restart_during_a_stream_ends_it_whole_or_with_an_error(nats_server: NatsServer) -> None:
    async with on_broker(nats_server, says("a" * 60, pause_s=0.05)) as router:
        running = asyncio.create_task(router.client.post("/v1/completions", json={**BODY, "stream": True}))
        await until(lambda: bool(router.worker.requests))
        await asyncio.sleep(0.5)
        await nats_server.kill()
        await nats_server.start()
        events = sse_events((await running).text)
        assert events[-1] == "[DONE]"
        if "error" in events[-2]:
            assert all(event["choices"][0]["finish_reason"] is None for event in events[:-2])
        else:
            assert "".join(event["choices"][0]["text"] for event in events[:-1]) == "a" * 60


async def test_a_broker_that_hangs_is_noticed(nats_server: NatsServer) -> None:
    async with on_broker(nats_server, says("ok")) as router:
        nats_server.pause()
        try:
            reply = await asyncio.wait_for(router.client.post("/v1/completions", json=BODY), 10.0)
            assert reply.status_code == 503
            await until(lambda: not router.bus.is_connected)
        finally:
            nats_server.resume()
        for _ in range(600):
            reply = await router.client.post("/v1/completions", json=BODY)
            if reply.status_code == 200:
                break
            await asyncio.sleep(0.1)
        assert reply.status_code == 200
        await until_empty(router)  # no ghost of the refused one


async def test_calls_that_wait_in_a_queue_that_is_lost_are_told_so(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody will ever serve them. What runs already goes on."""
    monkeypatch.setattr(streams, "CHECK_S", 0.1)
    async with on_broker(nats_server, says("a" * 30, pause_s=0.1)) as router:
        running = asyncio.create_task(router.client.post("/v1/completions", json=BODY))
        await until(lambda: bool(router.worker.requests))
        router.worker.is_taking = False
        await asyncio.sleep(0.7)
        waiting = asyncio.create_task(router.client.post("/v1/completions", json=BODY))
        for _ in range(500):
            if await router.bus.num_messages("REQUESTS") == 2:
                break
            await asyncio.sleep(0.02)
        assert isinstance(router.bus, NatsBus)
        await router.bus._streams.must("STREAM.DELETE.REQUESTS")
        await router.bus.ensure_stream(requests_stream(10, 1 << 20))
        reply = await asyncio.wait_for(waiting, 10.0)
        assert reply.status_code == 503 and int(reply.headers["retry-after"]) <= 3
        assert reply.json()["error"]["message"] == "The broker has lost the request."
        assert (await running).json()["choices"][0]["text"] == "a" * 30


async def until_empty(router: Router) -> None:
    for _ in range(3000):
        if await router.bus.num_messages("REQUESTS") == 0:
            return
        await asyncio.sleep(0.02)
    raise AssertionError("the queue does not empty")
