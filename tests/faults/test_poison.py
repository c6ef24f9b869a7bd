"""Requests that workers die of: they cost two workers, and nobody else is given up for them."""

import asyncio
from typing import Any

import httpx
import pytest

from headrace_shared import codec
from headrace_shared.messages import Outcome
from headrace_shared.record_messages import DeadRequest
from headrace_shared.subjects import ALL_DEAD, DEAD
from tests.e2e.api import CHAT, TEXT, ask, body_of
from tests.faults.keeper import Keeper
from tests.integration.deployment import (
    MODEL,
    PROMPT,
    Client,
    Deployment,
    Heard,
    assert_complete,
    ended,
    until,
    until_empty,
    until_status,
)
from tests.scripted_engine import EXIT_AT, HANG_AT

pytestmark = pytest.mark.nats

NUM_WORKERS = 2
START_S = 90.0
"""However slow the machine."""
MATES = range(10)


async def dead_requests(client: Client) -> list[DeadRequest]:
    return [codec.decode(message.data, DeadRequest) for message in await client.bus.read(DEAD.name, ALL_DEAD, 100)]


async def mates(client: Client, max_tokens: int) -> list[Heard]:
    return [await client.submit([seed, *PROMPT], max_tokens=max_tokens, seed=seed) for seed in MATES]


def assert_given_up(heard: Heard) -> None:
    assert [(event.outcome, event.code) for event in heard.endings] == [(Outcome.FAILED, "request_quarantined")]
    assert "exit" not in heard.endings[0].message and "worker-" not in heard.endings[0].message


async def test_requests_that_kill_engines_cost_two_workers_each(deployment: Deployment, client: Client) -> None:
    """One with its first token, and then one in the middle of a full batch."""
    await deployment.scheduler()
    async with Keeper.of(deployment, NUM_WORKERS, step_s=0.01) as keeper:
        await until(lambda: client.gauge("scheduler-1", "num_workers") == NUM_WORKERS, START_S, "adoption")
        for number, at in enumerate((0, 30), start=1):
            innocent = await mates(client, 120)
            poison = await client.submit([EXIT_AT, at, 7], max_tokens=100)
            later = [await client.submit(PROMPT, max_tokens=60, seed=seed) for seed in range(4)]
            await ended(poison, *innocent, *later)
            await until_empty(client)
            assert len(keeper.deaths) == 2 * number
            assert_given_up(poison)
            for heard in innocent:
                assert_complete(heard, 120)
            for heard in later:
                assert_complete(heard, 60)
            dead = (await dead_requests(client))[-1]
            assert dead.request_id == poison.request.request_id and dead.request is None
            assert len(dead.losses) == 2 and all("exit code 7" in reason for reason in dead.losses), dead
            assert (dead.num_prompt_tokens, dead.num_output_tokens <= at) == (3, True)


async def test_requests_that_make_engines_hang_cost_two_workers_each(deployment: Deployment, client: Client) -> None:
    """Two at once, in one batch with the others."""
    await deployment.scheduler()
    async with Keeper.of(deployment, NUM_WORKERS, step_s=0.005, hang_timeout_s=1.0) as keeper:
        await until(lambda: client.gauge("scheduler-1", "num_workers") == NUM_WORKERS, START_S, "adoption")
        innocent = await mates(client, 100)
        poison = [await client.submit([HANG_AT, at, 7], max_tokens=60) for at in (5, 40)]
        await ended(*poison, *innocent)
        await until_empty(client)
        assert len(keeper.deaths) <= 4
        for heard in poison:
            assert_given_up(heard)
        for heard in innocent:
            assert_complete(heard, 100)
        assert {dead.request_id for dead in await dead_requests(client)} == {item.request.request_id for item in poison}


async def test_one_worker_is_enough_to_find_out(deployment: Deployment, client: Client) -> None:
    """One worker, which is started again each time; two other requests behind the poison."""
    await deployment.scheduler(max_deliveries=3)
    async with Keeper.of(deployment, 1, step_s=0.005) as keeper:
        await until(lambda: client.gauge("scheduler-1", "num_workers") == 1.0, START_S, "adoption")
        poison = await client.submit([EXIT_AT, 2], max_tokens=20)
        others = [await client.submit(PROMPT, max_tokens=40, seed=seed) for seed in range(2)]
        await ended(poison, *others)
        await until_empty(client)
        assert len(keeper.deaths) == 2
        assert_given_up(poison)
        for heard in others:
            assert_complete(heard, 40)


async def test_the_client_gets_a_clean_error(deployment: Deployment, client: Client) -> None:
    url = await deployment.router()
    await deployment.scheduler()
    async with (
        Keeper.of(deployment, 1, step_s=0.005, engine="tests.scripted_text"),
        httpx.AsyncClient(base_url=url, timeout=START_S, trust_env=False) as api,
    ):
        await until_status(api, "/health", 200, START_S)
        script: dict[str, Any] = {"echo": "abc", "exit_at": 4}
        whole, streamed, fine = await asyncio.gather(
            api.post(TEXT, json=body_of(TEXT, script, model=MODEL, max_tokens=50)),
            ask(api, CHAT, script, True, model=MODEL, max_tokens=50),
            ask(api, TEXT, {"echo": "xy"}, model=MODEL, max_tokens=40),
        )
    assert whole.status_code == 500 and whole.json()["error"]["code"] == "request_quarantined"
    assert streamed.error is not None and streamed.error["code"] == "request_quarantined"
    assert streamed.finish is None and fine.text == "xy" * 20
