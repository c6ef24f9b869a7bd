"""The live page's routes at a running router."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from headrace_router.settings import RouterSettings
from headrace_shared.api_keys import PREFIX
from tests.byte_model import MODEL
from tests.router.support import Router, running_router, says, until

OWN = {"headrace-dashboard": "1"}


async def events_of(response: httpx.Response) -> AsyncIterator[tuple[str, Any]]:
    name = "message"
    async for line in response.aiter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))
            name = "message"


async def ask(router: Router, count: int = 1) -> list[str]:
    """Ids of requests."""
    answers = [
        (await router.client.post("/v1/completions", json={"model": MODEL, "prompt": "secret words"})).json()
        for _ in range(count)
    ]
    return [answer["id"].removeprefix("cmpl-") for answer in answers]


async def test_the_page_runs_only_its_own_scripts_and_asks_nobody_else() -> None:
    async with running_router(says("abc")) as router:
        page = await router.client.get("/dashboard")
        policy = page.headers["content-security-policy"]
        assert page.status_code == 200 and "default-src 'none'" in policy and "script-src 'self';" in policy
        assert "unsafe" not in policy and page.headers["x-content-type-options"] == "nosniff"
        assert (await router.client.get("/")).headers["location"] == "/dashboard"
        links = re.findall(r'(?:src|href)="([^"#]+)"', page.text)
        assert links and all(link.startswith("/dashboard/static/") for link in links)
        for link in links:
            answer = await router.client.get(link)
            assert answer.status_code == 200 and answer.headers["content-security-policy"] == policy
        again = await router.client.get("/dashboard", headers={"if-none-match": page.headers["etag"]})
        assert again.status_code == 304 and again.content == b""


async def test_who_only_looks_whether_the_page_is_there_hears_that_it_is() -> None:
    """`curl -I`, say, and what watches sites."""
    async with running_router(says("abc")) as router:
        assert (await router.client.head("/")).headers["location"] == "/dashboard"
        page = await router.client.head("/dashboard")
        assert page.status_code == 200 and page.content == b"" and int(page.headers["content-length"]) > 0


@pytest.mark.parametrize("path", ["nothing.js", "../pages.py", "%2e%2e/pages.py", "vendor", ""])
async def test_only_the_pages_own_files_are_served(path: str) -> None:
    async with running_router(says("abc")) as router:
        answer = await router.client.get(f"/dashboard/static/{path}")
        assert answer.status_code == 404 and answer.json()["error"]["code"] == "not_found"


async def test_frames_come_once_a_second_and_show_what_the_router_does() -> None:
    async with running_router(says("abc")) as router:
        await ask(router, 3)
        async with router.client.stream("GET", "/dashboard/api/live") as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            events = events_of(response)
            name, past = await anext(events)
            assert name == "past" and past["boot"] == router.service.id and "queue" in past["columns"]
            while True:
                name, frame = await anext(events)
                assert name == "frame"
                if frame["routers"] and frame["routers"][0]["ttft_p50_ms"] is not None:
                    break
        assert frame["routers"][0]["id"] == router.service.id and frame["routers"][0]["state"] == "ready"
        assert frame["totals"]["ttft_p50_ms"] > 0 and frame["totals"]["queue"] == 0
        assert [worker["state"] for worker in frame["workers"]] == ["ready"]
        frames = (await router.client.get(f"/dashboard/api/frames?first=1&last={frame['seq']}")).json()
        assert frames[-1] == frame and [each["seq"] for each in frames] == list(range(1, frame["seq"] + 1))
        assert (await router.client.get("/dashboard/api/frames?first=x&last=1")).json()["error"]["param"] == "first"


async def test_an_open_page_does_not_hold_up_the_routers_end() -> None:
    async with running_router(says("abc")) as router, router.client.stream("GET", "/dashboard/api/live") as response:
        events = events_of(response)
        await anext(events)
        router.service.drain()
        async with asyncio.timeout(3.0):
            async for _ in events:
                pass


async def test_requests_are_listed_with_their_times_and_without_their_text() -> None:
    async with running_router(says("abc")) as router:
        (request_id,) = await ask(router)
        answer = await router.client.get("/dashboard/api/requests")
        (listed,) = answer.json()["requests"]
        assert listed["id"] == request_id and listed["outcome"] == "finished" and listed["output_tokens"] == 4
        assert listed["arrived_at"] <= listed["queued_at"] <= listed["first_token_at"] <= listed["ended_at"]
        assert "secret" not in answer.text
        # Somebody else's credentials see neither the list nor the request.
        other = {"authorization": "Bearer other"}
        assert (await router.client.get("/dashboard/api/requests", headers=other)).json() == {"requests": []}
        hidden = await router.client.get(f"/dashboard/api/requests/{request_id}", headers=other)
        assert hidden.status_code == 404
        told = (await router.client.get(f"/dashboard/api/requests/cmpl-{request_id}")).json()
        assert told["problem"] == "No scheduler of this model is running."
        # Monotonic times are told by the wall clock of the moment, which is not the same twice to the last digit.
        assert told["request"] == {
            key: pytest.approx(value, abs=0.1) if key.endswith("_at") else value for key, value in listed.items()
        }


async def test_a_flood_is_load_like_any_other_and_tells_how_it_goes() -> None:
    async with running_router(says("abc")) as router:
        plan = {"rate": 60, "duration_s": 1, "prompt_words": 5, "output_tokens": 8}
        async with router.client.stream("POST", "/dashboard/api/flood", json=plan, headers=OWN) as response:
            assert response.status_code == 200
            told = [event async for event in events_of(response)]
        assert told[-1][0] == "done" and all(name == "message" for name, _ in told[:-1])
        last = told[-2][1]
        assert last["due"] == last["complete"] > 20 and last["open"] == 0 and last["errors"] == {}
        assert max(event["tokens_per_s"] for _, event in told[:-1]) > 0
        metrics = (await router.client.get("/metrics")).text
        assert f'headrace_requests_total{{model="{MODEL}",outcome="finished"}} {last["complete"]}.0' in metrics
        assert {request.stop.max_tokens for request in router.worker.requests} == {8}


async def test_a_flood_ends_with_its_page_and_there_is_one_at_a_time() -> None:
    async with running_router(says("abc", pause_s=0.2)) as router:
        plan = {"rate": 50, "duration_s": 60}
        async with router.client.stream("POST", "/dashboard/api/flood", json=plan, headers=OWN) as response:
            await anext(events_of(response))
            second = await router.client.post("/dashboard/api/flood", json=plan, headers=OWN)
            assert second.status_code == 503 and second.json()["error"]["code"] == "flood_running"
        await until(lambda: not any(task.get_name() == "flood" for task in asyncio.all_tasks()))
        await asyncio.sleep(0.3)
        count = len(router.worker.requests)
        await asyncio.sleep(0.3)
        assert len(router.worker.requests) == count
        short = {"rate": 50, "duration_s": 1}
        async with router.client.stream("POST", "/dashboard/api/flood", json=short, headers=OWN) as response:
            assert response.status_code == 200


async def test_a_flood_does_not_hold_up_the_routers_end() -> None:
    async with running_router(says("abc", pause_s=0.2)) as router:
        plan = {"rate": 5, "duration_s": 60}
        async with router.client.stream("POST", "/dashboard/api/flood", json=plan, headers=OWN) as response:
            events = events_of(response)
            await anext(events)
            router.service.drain()
            async with asyncio.timeout(4.0):
                assert [name async for name, _ in events][-1] == "done"


@pytest.mark.parametrize(
    ("plan", "param"),
    [({"rate": 0}, "rate"), ({"rate": 1e9}, "rate"), ({"rate": 1, "duration_s": 1e6}, "duration_s"), ({}, None)],
)
async def test_a_flood_that_makes_no_sense_is_refused_by_field(plan: dict[str, float], param: str | None) -> None:
    async with running_router(says("abc")) as router:
        answer = await router.client.post("/dashboard/api/flood", json=plan, headers=OWN)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == param


async def test_another_sites_page_cannot_start_a_flood() -> None:
    """A browser asks before it sends a header of ours to us from elsewhere, and nobody says yes."""
    async with running_router(says("abc")) as router:
        answer = await router.client.post("/dashboard/api/flood", json={"rate": 1})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "headrace-dashboard"
        asked = await router.client.options("/dashboard/api/flood", headers={"origin": "http://elsewhere"})
        assert "access-control-allow-origin" not in asked.headers


async def test_without_a_valid_key_only_the_pages_files_are_to_be_had() -> None:
    async with running_router(says("abc")) as router:
        bad = {"authorization": f"Bearer {PREFIX}0123456789ab-revoked", **OWN}
        for path in ("live", "frames?first=1&last=2", "requests", "requests/0"):
            assert (await router.client.get(f"/dashboard/api/{path}", headers=bad)).status_code == 401
        flood = await router.client.post("/dashboard/api/flood", json={"rate": 1}, headers=bad)
        assert flood.status_code == 401
        for path in ("/dashboard", "/dashboard/static/page.css"):
            assert (await router.client.get(path, headers=bad)).status_code == 200


async def test_it_can_be_switched_off() -> None:
    settings = RouterSettings(port=0, drain_delay_s=0.0, drain_timeout_s=5.0, dashboard=False)
    async with running_router(says("abc"), settings=settings) as router:
        for path in ("/dashboard", "/dashboard/static/index.html", "/dashboard/api/requests", "/"):
            assert (await router.client.get(path)).status_code == 404
