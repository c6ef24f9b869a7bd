"""How long an answer may take, by a header and within the setting."""

import asyncio
import time
from typing import Any

import pytest

from headrace_router.settings import RouterSettings
from headrace_shared.messages import CancelReason, Outcome
from tests.byte_model import MODEL
from tests.patience import PATIENCE_S
from tests.router.endings import assert_clean
from tests.router.scripts import endless, silent
from tests.router.support import MESSAGES, Router, running_router, says

SETTINGS = RouterSettings(port=0, drain_delay_s=0.0, request_timeout_s=2.0)


async def ask(router: Router, timeout_s: str, **fields: Any) -> Any:
    body = {"model": MODEL, "messages": MESSAGES, **fields}
    return await router.client.post("/v1/chat/completions", json=body, headers={"Headrace-Timeout": timeout_s})


@pytest.mark.parametrize("script", [endless, silent], ids=["running", "silent"])
async def test_the_client_says_how_long(script: Any) -> None:
    patient = RouterSettings(port=0, drain_delay_s=0.0, request_timeout_s=PATIENCE_S)
    async with running_router(script, settings=patient) as router:
        started = time.monotonic()
        reply = await ask(router, "0.3")
        assert (reply.status_code, reply.json()["error"]["code"]) == (408, "timeout")
        assert time.monotonic() - started < PATIENCE_S / 2
        assert [cancel.reason for cancel in router.worker.cancels] == [CancelReason.DEADLINE]
        [request] = router.worker.requests
        assert request.timeout_s == 0.3
        await assert_clean(router, Outcome.CANCELLED)  # in the scripted worker's words


async def test_within_the_setting() -> None:
    async with running_router(says("abc"), settings=SETTINGS) as router:
        assert (await ask(router, "1000")).status_code == 200
        assert (await ask(router, "1.5")).status_code == 200
        assert [request.timeout_s for request in router.worker.requests] == [2.0, 1.5]
        refused = await ask(router, "soon")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "Headrace-Timeout")


async def test_a_stream_is_told() -> None:
    async with running_router(endless, settings=SETTINGS) as router:
        reply = await ask(router, "0.3", stream=True)
        assert reply.status_code == 200 and '"code":"timeout"' in reply.text
        assert reply.text.endswith("data: [DONE]\n\n")


async def test_late_in_the_queue() -> None:
    async with running_router(endless, settings=SETTINGS) as router:
        router.worker.is_taking = False
        await asyncio.sleep(0.1)
        assert (await ask(router, "0.3")).status_code == 408
        await assert_clean(router, Outcome.EXPIRED)
        assert not router.worker.requests


async def test_too_late_before_it_is_queued() -> None:
    async with running_router(says("abc"), settings=SETTINGS) as router:
        reply = await ask(router, "0.000001")
        assert (reply.status_code, reply.json()["error"]["code"]) == (408, "timeout")
        assert not router.worker.requests and not router.worker.cancels
