"""Many streams at once: each ends exactly once, and afterwards everything is as it was before."""

import asyncio
import json
import random
import time
from collections import Counter
from typing import Any

import httpx
import psutil
import pytest

from headrace_shared.messages import Outcome, RequestEnded, RequestId
from tests import prompts
from tests.e2e.broker_view import broker_view
from tests.e2e.launcher import Launched
from tests.e2e.metrics import metric, wait_for_metric
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.model, pytest.mark.e2e, pytest.mark.nats, pytest.mark.timeout(600)]

NUM_CLIENTS = 64
NUM_REQUESTS = 500


async def stream(client: httpx.AsyncClient, url: str, number: int) -> list[str]:
    """The data lines of one streamed answer."""
    chance = random.Random(number)
    body: dict[str, Any] = {
        "model": "smollm2-135m",
        "prompt": chance.choice(prompts.SHORT + prompts.UNICODE) + f" {number}",
        "max_tokens": chance.randint(1, 12),
        "seed": number,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        return [line.removeprefix("data: ") async for line in response.aiter_lines() if line.startswith("data: ")]


def check(lines: list[str]) -> RequestId:
    """The id of a whole answer."""
    assert lines[-1] == "[DONE]"
    assert lines.count("[DONE]") == 1
    events = [json.loads(line) for line in lines[:-1]]
    assert not any("error" in event for event in events), events
    finished = [choice for event in events for choice in event["choices"] if choice["finish_reason"]]
    assert len(finished) == 1, events
    assert events[-1]["usage"]["completion_tokens"] >= 1
    (answer_id,) = {event["id"] for event in events}
    return RequestId(answer_id.removeprefix("cmpl-"))


def footprint(system: Launched) -> dict[str, int]:
    """Open files and sockets of each service; clients' connections are closed by then. The broker's files are not
    counted: it keeps those of its streams open for half a minute after it has last read or written them."""
    found = {}
    for each in system.ps():
        process = psutil.Process(each["pid"])
        is_broker = each["service"] == "nats"
        found[each["id"]] = len(process.net_connections()) if is_broker else process.num_fds()
    return found


async def test_five_hundred_requests_of_sixty_four_clients_leave_nothing_behind(system: Launched) -> None:
    urls = [f"http://127.0.0.1:{process['port']}" for process in system.processes("router")]
    async with httpx.AsyncClient(timeout=60) as client:
        check(await stream(client, urls[0], NUM_REQUESTS))  # lazily opened connections are open before the first count
        check(await stream(client, urls[1], NUM_REQUESTS))
    before = footprint(system)
    tasks_before = await metric(system, "router", "headrace_asyncio_tasks")
    numbers = iter(range(NUM_REQUESTS))
    streamed: list[RequestId] = []

    async def one_client() -> None:
        async with httpx.AsyncClient(timeout=300) as client:
            for number in numbers:
                streamed.append(check(await stream(client, urls[number % 2], number)))

    async with asyncio.TaskGroup() as group:
        for _ in range(NUM_CLIENTS):
            group.create_task(one_client())
    assert len(set(streamed)) == len(streamed) == NUM_REQUESTS

    async with broker_view(system) as broker:
        async with asyncio.timeout(PATIENCE_S):
            while await broker.num_queued():  # noqa: ASYNC110 - the broker's state
                await asyncio.sleep(0.1)
        log = await broker.token_log()
    ends = Counter(event.request_id for _, event in log if isinstance(event, RequestEnded))
    assert set(ends.values()) == {1}
    assert set(ends) == {event.request_id for _, event in log}
    # The log may still hold what other tests of this system cancelled.
    outcomes = {event.request_id: event.outcome for _, event in log if isinstance(event, RequestEnded)}
    assert {outcomes[request_id] for request_id in streamed} == {Outcome.FINISHED}

    await wait_for_metric(system, "scheduler", "headrace_blocks_referenced", 0)
    await wait_for_metric(system, "scheduler", "headrace_blocks_awaiting", 0)
    await wait_for_metric(system, "router", "headrace_requests_inflight", 0)
    await wait_for_metric(system, "router", "headrace_asyncio_tasks", tasks_before)
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        after = footprint(system)
        if all(abs(after[name] - count) <= 2 for name, count in before.items()):
            break
        await asyncio.sleep(0.2)
    assert all(abs(after[name] - count) <= 2 for name, count in before.items()), (before, after)
