"""What waiting clients are told of their place in the queue."""

import asyncio
import json
import re
from typing import Any

import pytest

from headrace_router.model_queue import Place
from headrace_router.queue_reports import comment, typed_event
from headrace_router.settings import RouterSettings
from headrace_shared.messages import RequestId
from tests.byte_model import MODEL
from tests.router.fleets import load_of, loads, telling, waiting, worker_figures
from tests.router.support import Router, running_router, says, until

SETTINGS = RouterSettings(port=0, drain_delay_s=0.0, queue_report_interval_s=0.1)
BODY = {"model": MODEL, "prompt": "a", "max_tokens": 5, "stream": True}
COMMENT = re.compile(r": position (\d+), eta (\d+\.\d) s")


def test_comments_are_comments_and_events_have_a_type() -> None:
    assert comment(Place(12, 3.44)) == b": position 12, eta 3.4 s\n\n"
    assert comment(Place(1, None)) == b": position 1\n\n"
    lines = typed_event(Place(2, None), RequestId("ab")).decode().splitlines()
    assert lines[0] == "event: headrace.queue" and lines[2] == ""
    assert json.loads(lines[1].removeprefix("data: ")) == {
        "object": "headrace.queue", "id": "ab", "position": 2, "eta_s": None,
    }  # fmt: skip


PERSON = {"User-Agent": "curl/8.5.0"}


async def ask(router: Router, headers: dict[str, str] = PERSON, **fields: Any) -> str:
    reply = await router.client.post("/v1/completions", json={**BODY, **fields}, headers=headers)
    assert reply.status_code == 200, reply.text
    return reply.text


async def stored(router: Router, number: int) -> None:
    await until(lambda: len(router.broker.streams["REQUESTS"].stored) == number)


async def test_people_hear_their_place_while_they_wait_and_nothing_once_it_runs() -> None:
    async with (
        running_router(says("abcde"), settings=SETTINGS) as router,
        telling(router.worker.bus, worker_figures(0.02)),
    ):
        router.worker.is_taking = False
        await asyncio.sleep(0.1)
        calls = []
        for number in range(3):
            calls.append(asyncio.create_task(ask(router, prompt=f"{number}")))
            await stored(router, number + 1)
        await asyncio.sleep(1.0)
        router.worker.is_taking = True
        texts = [await call for call in calls]
        told = [[int(position) for position, _ in COMMENT.findall(text)] for text in texts]
        for number, positions in enumerate(told):
            assert positions and positions[-1] == number + 1, told
            assert len(positions) >= 3
        for text in texts:
            # No event before the first token, and no comment after it.
            assert re.fullmatch(r"(: [^\n]*\n\n)+(data: [^\n]*\n\n)+", text), text


@pytest.mark.parametrize("agent", ["OpenAI/Python 3.51.0", "Python/3.12 aiohttp/3.14.3", "curly"])
async def test_programs_hear_nothing_that_they_could_stumble_over(agent: str) -> None:
    """Some strip what they read and expect an event in the rest, or take a blank line behind an id for an event."""
    settings = RouterSettings(port=0, drain_delay_s=0.0, queue_report_interval_s=0.1, ping_interval_s=0.2)
    async with (
        running_router(says("abcde"), settings=settings) as router,
        telling(router.worker.bus, worker_figures(0.02)),
    ):
        router.worker.is_taking = False
        await asyncio.sleep(0.1)
        call = asyncio.create_task(ask(router, {"User-Agent": agent}))
        await asyncio.sleep(0.9)
        router.worker.is_taking = True
        silence, data, rest = (await call).partition("data: ")
        assert len(silence) >= 4 and not silence.strip()
        assert re.fullmatch(r"(data: [^\n]*\n\n)+", data + rest)


async def test_others_requests_count_by_where_they_stand_in_the_stream() -> None:
    async with (
        running_router(says("abcde"), settings=SETTINGS) as router,
        telling(router.worker.bus, worker_figures(0.02)),
        loads(
            router.worker.bus,
            load_of("router-2", waiting(20, sequence=0), waiting(50, sequence=1000)),
            load_of("router-3", waiting(11, sequence=0)),
        ),
    ):
        router.worker.is_taking = False
        await asyncio.sleep(0.1)
        call = asyncio.create_task(ask(router))
        await stored(router, 1)
        await asyncio.sleep(0.8)
        router.worker.is_taking = True
        positions = [int(position) for position, _ in COMMENT.findall(await call)]
        assert positions[-1] == 32, positions
        [eta, *_] = [float(eta) for _, eta in COMMENT.findall(await ask(router))] or [0.0]
        assert eta < 30.0


@pytest.mark.parametrize(
    ("headers", "fields"),
    [({"Headrace-Queue-Events": "true"}, {}), ({}, {"stream_options": {"include_queue_events": True}})],
    ids=["header", "body"],
)
async def test_events_come_to_who_asks_for_them(headers: dict[str, str], fields: dict[str, Any]) -> None:
    async with (
        running_router(says("abcde"), settings=SETTINGS) as router,
        telling(router.worker.bus, worker_figures(0.02)),
    ):
        router.worker.is_taking = False
        await asyncio.sleep(0.1)
        call = asyncio.create_task(ask(router, headers, **fields))
        await asyncio.sleep(0.8)
        router.worker.is_taking = True
        blocks = (await call).split("\n\n")
        events = [block for block in blocks if block.startswith("event: headrace.queue\n")]
        assert events
        told = json.loads(events[-1].splitlines()[1].removeprefix("data: "))
        assert told["position"] == 1 and told["eta_s"] >= 0.0


async def test_a_call_without_a_stream_is_looked_up_by_the_clients_own_id() -> None:
    async with (
        running_router(says("abcde", pause_s=0.1), settings=SETTINGS) as router,
        telling(router.worker.bus, worker_figures(0.02)),
    ):
        router.worker.is_taking = False
        await asyncio.sleep(0.1)
        headers = {"X-Request-Id": "order-7"}
        body = {**BODY, "stream": False}
        call = asyncio.create_task(router.client.post("/v1/completions", json=body, headers=headers))
        await stored(router, 1)
        await asyncio.sleep(0.6)
        queued = (await router.client.get("/v1/requests/order-7?wait=false")).json()
        assert (queued["status"], queued["position"], queued["model"]) == ("queued", 1, MODEL)
        assert queued["eta_s"] is not None
        by_id = (await router.client.get(f"/v1/requests/{queued['id']}?wait=false")).json()
        assert (by_id["id"], by_id["status"]) == (queued["id"], "queued")
        foreign = await router.client.get(
            "/v1/requests/order-7?wait=false", headers={"Authorization": "Bearer somebody-else"}
        )
        assert foreign.status_code == 404
        router.worker.is_taking = True
        await until(lambda: bool(router.worker.requests))
        await asyncio.sleep(0.15)
        running = (await router.client.get("/v1/requests/order-7?wait=false")).json()
        assert running["status"] == "in_progress" and "position" not in running
        assert (await call).status_code == 200
        assert (await router.client.get("/v1/requests/order-7?wait=false")).status_code == 404


async def test_who_comes_back_while_the_call_waits_hears_its_place() -> None:
    async with (
        running_router(says("abcde"), settings=SETTINGS) as router,
        telling(router.worker.bus, worker_figures(0.02)),
    ):
        router.worker.is_taking = False
        await asyncio.sleep(0.1)
        async with router.client.stream(
            "POST", "/v1/completions", json=BODY, headers={"Headrace-Resumable": "1"}
        ) as reply:
            request_id = reply.headers["headrace-request-id"]
        back = asyncio.create_task(router.client.get(f"/v1/requests/{request_id}"))
        await asyncio.sleep(0.9)
        router.worker.is_taking = True
        text = (await back).text
        assert re.match(r": position 1(, eta \d+\.\d s)?\n\n", text), text
        assert text.endswith("data: [DONE]\n\n")


async def test_a_held_call_is_looked_up_at_any_router_to_its_end() -> None:
    async with (
        running_router(says("abcde"), settings=SETTINGS) as router,
        telling(router.worker.bus, worker_figures(0.02)),
    ):
        router.worker.is_taking = False
        await asyncio.sleep(0.1)
        request_id = ""
        with_key = {"Idempotency-Key": "k"}
        async with router.client.stream("POST", "/v1/completions", json=BODY, headers=with_key) as reply:
            request_id = reply.headers["headrace-request-id"]
            status = (await router.client.get(f"/v1/requests/{request_id}?wait=false")).json()
            assert status["status"] == "queued"
        # Its client is gone; what is known of it now is known to every router.
        await asyncio.sleep(0.4)
        status = (await router.client.get(f"/v1/requests/{request_id}?wait=false")).json()
        assert status["status"] == "queued" and status["position"] >= 1
        router.worker.is_taking = True
        for _ in range(1200):
            status = (await router.client.get(f"/v1/requests/{request_id}?wait=false")).json()
            if status["status"] == "completed":
                break
            await asyncio.sleep(0.05)
        assert (status["status"], status["completion_tokens"]) == ("completed", 5)
        assert (await router.client.get("/v1/requests/nothing?wait=false")).status_code == 404
