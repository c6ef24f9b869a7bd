"""Whatever way requests end, nothing of them is left, and nobody gets another's answer."""

import asyncio
import contextlib
import random

import httpx
import pytest

from tests.e2e.api import CHAT, TEXT, WAYS, ask, body_of
from tests.e2e.broker_view import broker_view
from tests.e2e.launcher import Launched
from tests.e2e.metrics import metric, wait_for_metric

pytestmark = [pytest.mark.e2e, pytest.mark.nats]

NUM_BLOCKS = 256
CONTEXT = 4096
NUM_ROUNDS = 60
"""Of eight requests each."""


async def leave(client: httpx.AsyncClient, path: str, prompt: object, stream: bool, after_s: float) -> None:
    """Asks for an endless answer, and drops the connection."""
    with contextlib.suppress(httpx.ReadTimeout, TimeoutError):
        async with asyncio.timeout(after_s):
            await ask(client, path, prompt, stream)


async def leave_at_the_first_token(client: httpx.AsyncClient, path: str) -> None:
    async with client.stream("POST", path, json=body_of(path, {"echo": "abc"}, True)) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                return


async def nothing_is_left(system: Launched) -> None:
    for service, name, value in (
        ("router", "headrace_requests_inflight", 0.0),
        ("scheduler", "headrace_sequences_running", 0.0),
        ("scheduler", "headrace_requests_waiting", 0.0),
        ("scheduler", "headrace_blocks_referenced", 0.0),
        ("scheduler", "headrace_blocks_awaiting", 0.0),
        ("scheduler", "headrace_blocks_free", float(NUM_BLOCKS)),
        ("worker", "headrace_sequences_running", 0.0),
        ("worker", "headrace_blocks_free", float(NUM_BLOCKS)),
    ):
        await wait_for_metric(system, service, name, value)
    async with broker_view(system) as broker:
        for _ in range(1200):
            if not await broker.num_queued():
                break
            await asyncio.sleep(0.05)
        assert await broker.num_queued() == 0


async def test_blocks_return_whatever_way_requests_end(scripted: Launched) -> None:
    """480 requests; afterwards one that needs the whole pool still fits."""
    chance = random.Random(8)
    urls = [f"http://127.0.0.1:{process['port']}" for process in scripted.processes("router")]
    long = "x" * 1500 + '{"echo": "abc"}'
    async with httpx.AsyncClient(timeout=60, base_url=urls[0]) as one, httpx.AsyncClient(base_url=urls[1]) as two:
        for number in range(NUM_ROUNDS):
            client = (one, two)[number % 2]
            path, stream = WAYS[number % 4]
            async with asyncio.TaskGroup() as group:
                for work in (
                    ask(client, path, {"text": f"{number}"}, stream, max_tokens=1),
                    ask(client, path, {"text": "three " * 9, "number": number % 7}, stream, max_tokens=30),
                    ask(client, path, {"choices": ["abcdef", "ab", "abcdefghij"]}, stream, n=3, stop=["cde"]),
                    leave(client, path, {"echo": "abc"}, stream, chance.uniform(0.0, 0.01)),  # queued, mostly
                    leave(client, path, f"{number}{long}", stream, chance.uniform(0.005, 0.03)),  # within the prompt
                    leave(client, path, {"echo": "abc"}, stream, chance.uniform(0.02, 0.1)),  # while decoding
                    leave(client, TEXT, [f"{number}{long}", long], stream, chance.uniform(0.0, 0.05)),
                    leave_at_the_first_token(client, path),
                ):
                    group.create_task(work)
        await nothing_is_left(scripted)
        whole = '{"text": "ok"}'.rjust(CONTEXT - 10, "y")
        assert (await ask(one, TEXT, whole, max_tokens=10)).text == "ok"
    await wait_for_metric(scripted, "worker", "headrace_blocks_free", NUM_BLOCKS)
    for log in scripted.data_dir.rglob("*.log"):
        assert "Traceback" not in log.read_text(), log


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_is_counted_and_its_message_acknowledged(scripted: Launched, stream: bool) -> None:
    """After token 5 of a stream; after a while of a whole answer."""
    counted = await metric(scripted, "scheduler", "headrace_requests_total")
    gone = await metric(scripted, "router", "headrace_clients_gone_total")
    iterations = await metric(scripted, "worker", "headrace_decode_tokens_total")
    async with httpx.AsyncClient(base_url=scripted.url, timeout=30) as client:
        if stream:
            async with client.stream("POST", TEXT, json=body_of(TEXT, {"echo": "ab"}, True, max_tokens=3000)) as reply:
                lines = reply.aiter_lines()
                for _ in range(10):  # every second one is empty
                    await anext(lines)
        else:
            await leave(client, CHAT, {"echo": "ab"}, False, 1.0)
        await nothing_is_left(scripted)
    await wait_for_metric(scripted, "scheduler", "headrace_requests_total", counted + 1)
    assert await metric(scripted, "router", "headrace_clients_gone_total") == gone + 1
    assert await metric(scripted, "worker", "headrace_decode_tokens_total") < iterations + 2500
    ended = await metric(scripted, "scheduler", "headrace_requests_total", outcome="cancelled")
    assert ended >= 1


async def test_fifty_streams_hear_only_themselves(scripted: Launched) -> None:
    """Through two routers, on both endpoints, with random cancels between them."""
    chance = random.Random(50)
    urls = [f"http://127.0.0.1:{process['port']}" for process in scripted.processes("router")]
    nonces = [f"{chance.randrange(16**8):08x}" for _ in range(50)]
    limits = httpx.Limits(max_connections=None)
    async with (
        httpx.AsyncClient(base_url=urls[0], timeout=60, limits=limits) as one,
        httpx.AsyncClient(base_url=urls[1], timeout=60, limits=limits) as two,
    ):

        async def one_stream(number: int) -> str | None:
            client, (path, stream) = (one, two)[number % 2], WAYS[number % 4]
            await asyncio.sleep(chance.uniform(0.0, 0.3))
            if number % 5 == 4:
                await leave(client, path, {"echo": nonces[number]}, stream, chance.uniform(0.01, 0.5))
                return None
            return (await ask(client, path, {"echo": nonces[number]}, stream, max_tokens=80)).text

        texts = await asyncio.gather(*(one_stream(number) for number in range(50)))
    for nonce, text in zip(nonces, texts, strict=True):
        assert text is None or text == nonce * 10
    await nothing_is_left(scripted)
