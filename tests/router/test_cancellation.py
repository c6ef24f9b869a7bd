"""A client that goes away stops its work: streaming or not, running or queued. Nothing is left behind."""

import asyncio
import contextlib
import json
import socket
from typing import Any

import httpx
import pytest

from headrace_router.settings import RouterSettings
from headrace_shared.messages import CancelReason, Outcome, Request
from tests.byte_model import MODEL, byte_ids
from tests.router.endings import assert_clean, ended_events
from tests.router.scripts import endless, silent
from tests.router.support import MESSAGES, ScriptedWorker, running_router, until


async def test_leaving_a_running_stream() -> None:
    async with running_router(endless) as router:
        body = {"model": MODEL, "messages": MESSAGES, "stream": True}
        async with router.client.stream("POST", "/v1/chat/completions", json=body) as reply:
            async for line in reply.aiter_lines():
                if line.startswith("data: "):
                    break
        await until(lambda: bool(router.worker.cancels), 1.0)
        [cancel] = router.worker.cancels
        assert cancel.request_id == router.worker.requests[0].request_id
        assert (cancel.choice, cancel.reason) == (None, CancelReason.CLIENT)
        await assert_clean(router)
        assert "headrace_clients_gone_total 1.0" in (await router.client.get("/metrics")).text


@pytest.mark.parametrize("script", [endless, silent])
async def test_leaving_a_running_whole_answer(script: Any) -> None:
    async with running_router(script) as router:
        body = {"model": MODEL, "messages": MESSAGES}
        with pytest.raises(httpx.ReadTimeout):
            await router.client.post("/v1/chat/completions", json=body, timeout=0.3)
        await until(lambda: bool(router.worker.cancels), 1.0)
        await assert_clean(router)


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_the_queue(stream: bool) -> None:
    async with running_router(endless) as router:
        router.worker.is_taking = False
        await asyncio.sleep(0.1)
        body = {"model": MODEL, "messages": MESSAGES, "stream": stream}
        with contextlib.suppress(httpx.ReadTimeout):
            async with router.client.stream("POST", "/v1/chat/completions", json=body, timeout=0.3) as reply:
                async for _ in reply.aiter_lines():
                    break
        await assert_clean(router)
        assert router.worker.requests == []
        assert router.broker.streams["CANCELS"].stored  # for a scheduler that pulled it in the last moment


async def test_leaving_the_queue_while_a_scheduler_takes_the_request() -> None:
    """The scheduler pulled it and has said nothing yet: it hears the Cancel and writes the terminal event alone."""
    async with running_router(silent) as router:
        body = {"model": MODEL, "messages": MESSAGES}
        with pytest.raises(httpx.ReadTimeout):
            await router.client.post("/v1/chat/completions", json=body, timeout=0.2)
        await assert_clean(router)
        assert len(router.worker.requests) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_with_another_request_already_sent(stream: bool) -> None:
    """Pipelining: the first of them is being answered, and the one behind it is what the server read last."""
    async with running_router(silent) as router:
        body = json.dumps({"model": MODEL, "messages": MESSAGES, "stream": stream}).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
        _, writer = await asyncio.open_connection("127.0.0.1", router.port)
        writer.write(2 * (head + body))
        await until(lambda: bool(router.worker.requests))
        writer.close()
        await until(lambda: bool(router.worker.cancels), 1.0)
        await assert_clean(router)
        assert len(router.worker.requests) == 1


async def test_leaving_with_several_prompts() -> None:
    async with running_router(endless) as router:
        body = {"model": MODEL, "prompt": ["a", "b", "c"]}
        with pytest.raises(httpx.ReadTimeout):
            await router.client.post("/v1/completions", json={**body, "max_tokens": 200}, timeout=0.3)
        await until(lambda: len(router.worker.cancels) == 3)
        await until(lambda: not router.broker.streams["REQUESTS"].stored)
        assert {event.outcome for event in ended_events(router)} == {Outcome.CANCELLED}


async def test_the_deadline_ends_what_runs() -> None:
    settings = RouterSettings(port=0, drain_delay_s=0.0, request_timeout_s=0.3)
    async with running_router(endless, settings=settings) as router:
        reply = await router.client.post("/v1/chat/completions", json={"model": MODEL, "messages": MESSAGES})
        assert reply.status_code == 408
        assert reply.json()["error"]["code"] == "timeout"
        await until(lambda: bool(router.worker.cancels))
        assert router.worker.cancels[0].reason is CancelReason.DEADLINE


async def test_the_deadline_ends_what_is_queued() -> None:
    settings = RouterSettings(port=0, drain_delay_s=0.0, request_timeout_s=0.3)
    async with running_router(endless, settings=settings) as router:
        router.worker.is_taking = False
        await asyncio.sleep(0.1)
        reply = await router.client.post("/v1/completions", json={"model": MODEL, "prompt": "a"})
        assert reply.status_code == 408
        await assert_clean(router, Outcome.EXPIRED)


async def test_a_stop_string_stops_the_choice_on_the_worker() -> None:
    async with running_router(endless) as router:
        body = {"model": MODEL, "prompt": "a", "max_tokens": 200, "stop": "aaa"}
        reply = await router.client.post("/v1/completions", json=body)
        assert reply.json()["choices"][0]["text"] == ""
        assert reply.json()["usage"]["completion_tokens"] == 3
        await until(lambda: bool(router.worker.cancels))
        [cancel] = router.worker.cancels
        assert (cancel.choice, cancel.reason) == (0, CancelReason.STOP)


async def test_a_client_that_reads_nothing_is_cut_off() -> None:
    async def flood(worker: ScriptedWorker, request: Request) -> None:
        for i in range(1000):  # more than the kernel's buffers hold
            worker.frame(request, byte_ids("a") * 8000, 8000 * i)
            await asyncio.sleep(0)

    settings = RouterSettings(port=0, drain_delay_s=0.0, send_timeout_s=0.5)
    async with running_router(flood, settings=settings) as router:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", router.port))
        reader, writer = await asyncio.open_connection(sock=connection, limit=1024)
        body = b'{"model": "tiny", "prompt": "a", "stream": true, "max_tokens": 200, "ignore_eos": true}'
        head = (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        )
        writer.write(head % len(body) + body)
        await until(lambda: bool(router.worker.cancels), 10.0)
        data = await asyncio.wait_for(reader.read(-1), 20.0)
        assert not data.endswith(b"0\r\n\r\n"), "a cut stream must not end as if it were whole"
        writer.close()
