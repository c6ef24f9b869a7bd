"""A request whose time is up ends with a clear word and costs nothing any more; nothing at all if it was queued."""

import asyncio
import os
import signal
import time
from collections.abc import Sequence

import httpx
import pytest

from headrace_shared.messages import Outcome, RequestEnded, TokenFrame
from tests.e2e.api import CHAT, TEXT, body_of
from tests.e2e.broker_view import broker_view
from tests.e2e.launcher import Launched
from tests.e2e.metrics import metric, wait_for_metric
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.e2e, pytest.mark.nats]

SHORT = {"Headrace-Timeout": "0.7"}


def outcomes_of(request_id: str, log: Sequence[tuple[str, RequestEnded | TokenFrame]]) -> list[Outcome]:
    """The log also holds what other tests of this system did, whenever their last events come."""
    return [event.outcome for _, event in log if isinstance(event, RequestEnded) and event.request_id == request_id]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_time_of_a_running_request_is_up(scripted: Launched, stream: bool) -> None:
    async with httpx.AsyncClient(timeout=60, base_url=scripted.url) as client:
        body = body_of(CHAT, {"echo": "abc"}, stream, max_tokens=3900)
        started = time.monotonic()
        reply = await client.post(CHAT, json=body, headers=SHORT)
        took_s = time.monotonic() - started
        assert 0.6 < took_s < PATIENCE_S
        if stream:
            assert reply.status_code == 200 and '"finish_reason":"' not in reply.text
            [*_, error, done, _] = reply.text.split("\n\n")
            assert '"code":"timeout"' in error and done == "data: [DONE]"
        else:
            assert reply.status_code == 408 and reply.headers["x-should-retry"] == "false"
            assert reply.json()["error"]["code"] == "timeout"
    async with broker_view(scripted) as broker, asyncio.timeout(PATIENCE_S):
        while not (ended := outcomes_of(reply.headers["x-request-id"], await broker.token_log())):  # noqa: ASYNC110 - the broker's state
            await asyncio.sleep(0.1)
    assert ended == [Outcome.EXPIRED]


async def test_a_request_that_is_late_in_the_queue_never_reaches_a_worker(scripted: Launched) -> None:
    await wait_for_metric(scripted, "scheduler", "headrace_sequences_running", 0.0)
    prefilled = await metric(scripted, "worker", "headrace_prefill_tokens_total")
    scheduler = scripted.pid("scheduler")
    async with httpx.AsyncClient(timeout=60, base_url=scripted.url) as client:
        os.kill(scheduler, signal.SIGSTOP)
        try:
            asked = (client.post(TEXT, json=body_of(TEXT, {"text": f"{n}"}), headers=SHORT) for n in range(5))
            replies = await asyncio.gather(*asked)
        finally:
            os.kill(scheduler, signal.SIGCONT)
        assert {(reply.status_code, reply.json()["error"]["code"]) for reply in replies} == {(408, "timeout")}
        async with broker_view(scripted) as broker, asyncio.timeout(PATIENCE_S):
            while await broker.num_queued():  # noqa: ASYNC110 - the broker's state
                await asyncio.sleep(0.1)
        assert await metric(scripted, "worker", "headrace_prefill_tokens_total") == prefilled
        reply = await client.post(TEXT, json=body_of(TEXT, {"text": "on it goes"}))
        assert reply.json()["choices"][0]["text"] == "on it goes"
