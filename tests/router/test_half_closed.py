"""A client that ends its side of the connection has left, whatever it is waiting for."""

import asyncio
import json

import pytest

from tests.byte_model import MODEL
from tests.router.support import Router, running_router, says, until

LONG = {"model": MODEL, "prompt": "Hi", "max_tokens": 200}


async def exchange(router: Router, body: dict[str, object], behind: bytes) -> bytes:
    """Ends its side once `behind` has come. All that comes until the router closes."""
    data = json.dumps(body).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
    try:
        writer.write(head % len(data) + data)
        came = await reader.readuntil(behind) if behind else b""
        writer.write_eof()
        return came + await asyncio.wait_for(reader.read(), 5.0)
    finally:
        writer.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_who_has_asked_and_ends_its_side_gets_no_answer(stream: bool) -> None:
    async with running_router(says("a" * 150, pause_s=0.05)) as router:
        assert await exchange(router, LONG | {"stream": stream}, b"") == b""
        reply = await router.client.post("/v1/completions", json=LONG | {"max_tokens": 1})
        assert reply.status_code == 200
        await until(lambda: len(router.worker.requests) - 1 == len(router.worker.cancels))


async def test_who_ends_its_side_during_a_stream_gets_no_more_of_it() -> None:
    async with running_router(says("a" * 150, pause_s=0.05)) as router:
        came = await exchange(router, LONG | {"stream": True}, b"data: {")
        assert b"[DONE]" not in came and b"\r\n0\r\n\r\n" not in came
        await until(lambda: len(router.worker.cancels) == 1)
