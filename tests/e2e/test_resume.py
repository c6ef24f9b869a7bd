"""Routers are killed while they stream: their clients go on at another one and miss nothing; what nobody comes back for
ends."""

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.api import CHAT, MODEL, TEXT, body_of
from tests.e2e.broker_view import broker_view
from tests.e2e.launcher import Launched, launched
from tests.e2e.resuming import HELD_ID, RESUMABLE, Story, tell
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.e2e, pytest.mark.nats]

REATTACH_TIMEOUT_S = 4.0
DRAIN_TIMEOUT_S = 4.0
LONG = ("안녕 🦉 ř the end is near, two three, " * 14).strip()
"""About 700 tokens, many of them a part of a character only."""

STREAMS: list[tuple[str, str, Any, dict[str, Any]]] = [
    ("chat", CHAT, {"text": LONG}, {}),
    ("completion", TEXT, {"text": LONG}, {}),
    (
        "usage",
        CHAT,
        {
            "text": LONG,
        },
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
    ("logprobs", CHAT, {"text": LONG, "n": 2}, {"logprobs": True, "top_logprobs": 2}),
    ("stop", TEXT, {"text": LONG + " stop!! here", "n": 3}, {"stop": ["stop!! he", "never"], "logprobs": 1}),
    ("two", CHAT, {"choices": [LONG, LONG[:300]]}, {"n": 2, "stop": ["zzz"]}),
]


@pytest.fixture(scope="module")
def fragile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    """Two routers whose clients have 4 s to come back, a scheduler, and a worker that answers as prompts say."""
    environment = {
        "HEADRACE_ENGINE_MODULE": "tests.scripted_text",
        "SCRIPTED_STEP_S": "0.005",
        "HEADRACE_NUM_BLOCKS": "1024",
        "HEADRACE_PREFIX_CACHING": "false",  # usage tells of it
        "HEADRACE_REATTACH_TIMEOUT_S": str(REATTACH_TIMEOUT_S),
        "HEADRACE_DRAIN_TIMEOUT_S": str(DRAIN_TIMEOUT_S),
        "HEADRACE_DRAIN_DELAY_S": "0.1",
    }
    arguments = ("--routers", "2", "--model", "smollm2-135m", "--no-autoscaler")
    with launched(tmp_path_factory.mktemp("fragile"), *arguments, environment=environment) as system:
        yield system


def urls_of(system: Launched) -> list[str]:
    return [f"http://127.0.0.1:{system.port + number}" for number in range(2)]


def pid_at(system: Launched, url: str) -> int:
    port = int(url.rsplit(":", 1)[1])
    return next(int(process["pid"]) for process in system.processes("router") if process["port"] == port)


class Running:
    """How many sequences the scheduler has on workers."""

    def __init__(self, system: Launched) -> None:
        self._url = f"http://127.0.0.1:{system.processes('scheduler')[0]['health_port']}/metrics"

    async def count(self) -> int:
        async with httpx.AsyncClient(timeout=5) as client:
            text = (await client.get(self._url)).text
        return int(float(re.findall(r"^headrace_sequences_running\S* (\S+)$", text, re.MULTILINE)[0]))

    async def until(self, count: int, timeout_s: float = PATIENCE_S) -> None:
        async with asyncio.timeout(timeout_s):
            while await self.count() != count:  # noqa: ASYNC110 - another process's figure
                await asyncio.sleep(0.05)


async def until_healthy(url: str, timeout_s: float = 60.0) -> None:
    async with httpx.AsyncClient(timeout=2.0) as client, asyncio.timeout(timeout_s):
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if (await client.get(f"{url}/health")).status_code == 200:
                    return
            await asyncio.sleep(0.1)


async def test_streams_survive_the_deaths_of_their_routers(fragile: Launched) -> None:
    one, two = urls_of(fragile)
    chance = random.Random(4)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=60, limits=limits) as client:

        async def all_streams(urls: list[str], on_event: Any = lambda number: None) -> list[Story]:
            bodies = [(path, body_of(path, script, True, max_tokens=1500, **more)) for _, path, script, more in STREAMS]
            for (_, body), (name, *_) in zip(bodies, STREAMS, strict=True):
                if name in ("chat", "completion", "logprobs", "stop"):
                    del body["stream_options"]
            return await asyncio.gather(*(tell(client, urls, path, body, on_event=on_event) for path, body in bodies))

        expected = await all_streams([two])
        assert all(story.num_breaks == 0 for story in expected)
        pids = {url: pid_at(fragile, url) for url in (one, two)}
        num_seen = 0
        kills = asyncio.Queue[str]()
        num_events = sum(len(story.events) for story in expected)
        at = {int(num_events * chance.uniform(0.1, 0.3)): one, int(num_events * chance.uniform(0.4, 0.6)): two}

        def count(_: int) -> None:
            nonlocal num_seen
            num_seen += 1
            if num_seen in at:
                kills.put_nowait(at[num_seen])

        async def kill() -> None:
            for _ in at:
                url = await kills.get()
                for other in (one, two):
                    if other != url:
                        await until_healthy(other)
                os.kill(pids[url], signal.SIGKILL)

        killing = asyncio.create_task(kill())
        stories = await all_streams([one, two], count)
        await asyncio.wait_for(killing, 90.0)
        assert sum(story.num_breaks for story in stories) >= len(stories)
        for (name, *_), want, got in zip(STREAMS, expected, stories, strict=True):
            assert got.choices() == want.choices(), name
            assert got.usage() == want.usage(), name
            assert all(len(choice["ends"]) == 1 for choice in got.choices().values()), name
            if name != "two":  # the second choice starts when the scheduler finds room for it
                assert got.chunks() == want.chunks(), name
        await until_healthy(one)
        await until_healthy(two)
        for (name, *_), got in zip(STREAMS, stories, strict=True):
            whole = await tell(client, [one], "", {}, request_id=got.request_id)
            assert whole.choices() == got.choices(), name
            if name != "two":  # which choice's turn it is may differ around a break
                assert whole.events == got.events, name


async def test_what_a_dead_router_leaves_behind_ends_unless_somebody_wants_it(fragile: Launched) -> None:
    one, two = urls_of(fragile)
    await until_healthy(one)
    await until_healthy(two)
    running, pid = Running(fragile), pid_at(fragile, one)
    body = body_of(TEXT, {"echo": "abc"}, True, max_tokens=4000)
    async with httpx.AsyncClient(timeout=30) as client, contextlib.AsyncExitStack() as streams:
        open_lines, ids = [], []
        for headers, more in (
            ({}, {}),  # ordinary
            (RESUMABLE, {}),  # nobody comes back
            (RESUMABLE, {}),  # somebody does
            (RESUMABLE, {"background": True}),
        ):
            asked = client.stream("POST", one + TEXT, json=body | more, headers=headers)
            reply = await streams.enter_async_context(asked)
            lines = reply.aiter_lines()
            open_lines.append(lines)  # or it would be closed
            ids.append((reply.headers.get(HELD_ID), (await anext(lines)).removeprefix("id: ")))
        await running.until(4)
        os.kill(pid, signal.SIGKILL)
        died_at = time.monotonic()
        with contextlib.suppress(httpx.HTTPError):
            await streams.aclose()
        request_id, last = ids[2]
        attached = client.stream("GET", f"{two}/v1/requests/{request_id}", headers={"Last-Event-ID": last})
        async with attached as reply:
            lines = reply.aiter_lines()
            await running.until(2)
            assert REATTACH_TIMEOUT_S - 1.5 < time.monotonic() - died_at < REATTACH_TIMEOUT_S + PATIENCE_S
            await asyncio.sleep(1.0)
            assert await running.count() == 2
            async with asyncio.timeout(PATIENCE_S):
                assert (await anext(lines)).startswith("id: ")
        for number in (2, 3):
            assert (await client.post(f"{two}/v1/requests/{ids[number][0]}/cancel")).status_code == 200
        await running.until(0)
        told = await client.get(f"{two}/v1/requests/{ids[1][0]}", headers={"Last-Event-ID": ids[1][1]})
        assert '"code":"cancelled"' in told.text
        await until_healthy(one)


async def test_a_call_with_a_key_runs_once_though_its_router_dies(fragile: Launched) -> None:
    two, one = urls_of(fragile)  # the other dies this time
    running, pid = Running(fragile), pid_at(fragile, one)
    body = body_of(CHAT, {"text": LONG}, False, max_tokens=1500)
    headers = {"Idempotency-Key": "a call"}
    async with httpx.AsyncClient(timeout=60) as client, broker_view(fragile) as broker:
        before = await broker.num_ever_queued()
        first = asyncio.create_task(client.post(one + CHAT, json=body, headers=headers))
        await running.until(1)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(httpx.HTTPError):
            await first
        answers = await asyncio.gather(*(client.post(two + CHAT, json=body, headers=headers) for _ in range(3)))
        assert {answer.status_code for answer in answers} == {200}
        assert {answer.json()["choices"][0]["message"]["content"] for answer in answers} == {LONG}
        assert len({json.dumps(answer.json()) for answer in answers}) == 1
        assert await broker.num_ever_queued() == before + 1
        other = await client.post(two + CHAT, json=body | {"max_tokens": 5}, headers=headers)
        assert (other.status_code, other.json()["error"]["param"]) == (422, "Idempotency-Key")
        await until_healthy(one)


async def test_a_router_that_is_told_to_stop_cuts_what_does_not_end(fragile: Launched) -> None:
    one, two = urls_of(fragile)
    running, pid = Running(fragile), pid_at(fragile, one)
    endless = body_of(TEXT, {"echo": "abc"}, True, max_tokens=4000)
    async with httpx.AsyncClient(timeout=60) as client:
        short = asyncio.create_task(client.post(one + TEXT, json=body_of(TEXT, {"text": LONG[:200]}, max_tokens=400)))
        last = ""
        async with client.stream("POST", one + TEXT, json=endless, headers=RESUMABLE) as reply:
            request_id = reply.headers[HELD_ID]
            with pytest.raises(httpx.RemoteProtocolError):
                async for line in reply.aiter_lines():
                    assert line != "data: [DONE]" and '"error":' not in line
                    if line.startswith("id: "):
                        if not last:
                            os.kill(pid, signal.SIGTERM)
                        last = line.removeprefix("id: ")
        assert (await short).status_code == 200
        path = f"{two}/v1/requests/{request_id}"
        async with client.stream("GET", path, headers={"Last-Event-ID": last}) as reply:
            lines = reply.aiter_lines()
            assert int((await anext(lines)).split(".")[1]) > int(last.split(".")[1])
        assert (await client.post(f"{path}/cancel")).status_code == 200
        await running.until(0)


async def test_background_responses_survive_the_death_of_their_router(fragile: Launched) -> None:
    """One is streamed and goes on at the other router, one is only asked for again."""
    one, two = urls_of(fragile)
    await until_healthy(one)
    await until_healthy(two)
    path, pid = "/v1/responses", pid_at(fragile, one)
    body = {"model": MODEL, "input": json.dumps({"text": LONG}), "background": True, "stop": "never there"}
    async with httpx.AsyncClient(timeout=60) as client:
        silent = (await client.post(one + path, json=body)).json()["id"]
        told: list[dict[str, Any]] = []
        with contextlib.suppress(httpx.HTTPError):
            async with client.stream("POST", one + path, json=body | {"stream": True}) as reply:
                async for line in reply.aiter_lines():
                    if line.startswith("data: "):
                        told.append(json.loads(line.removeprefix("data: ")))
                    if len(told) == 40 and pid:
                        os.kill(pid, signal.SIGKILL)
                        pid = 0
        assert 40 <= len(told) < 700 and not pid
        response_id, last = told[0]["response"]["id"], told[-1]["sequence_number"]
        rest = await client.get(f"{two}{path}/{response_id}?stream=true&starting_after={last}")
        assert rest.status_code == 200 and rest.text.endswith("data: [DONE]\n\n")
        told += [
            json.loads(line.removeprefix("data: ")) for line in rest.text.splitlines() if line.startswith("data: {")
        ]
        assert [event["sequence_number"] for event in told] == list(range(len(told)))
        assert "".join(event.get("delta", "") for event in told) == LONG
        for kept in (silent, response_id):
            async with asyncio.timeout(90.0):
                while True:
                    response = (await client.get(f"{two}{path}/{kept}")).json()
                    if response["status"] not in ("queued", "in_progress"):
                        break
                    await asyncio.sleep(0.1)
            assert response["status"] == "completed"
            assert response["output"][0]["content"][0]["text"] == LONG
        assert told[-1]["response"]["output"] == response["output"]
        await until_healthy(one)
