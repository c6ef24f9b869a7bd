"""The whole system with simulated workers: what waiting clients are told comes true, at both routers."""

import asyncio
import itertools
import json
import re
from pathlib import Path
from statistics import median
from typing import NamedTuple

import httpx
import pytest

from tests.e2e.launcher import Launched, launched

pytestmark = [pytest.mark.e2e, pytest.mark.nats, pytest.mark.timeout(600)]

MODEL = "smollm2-135m"
NUM_PLACES = 2
BEGINNING = 6
"""A token that does not share a partition with those 8 to 11 behind it."""
REPORT = re.compile(r": position (\d+)(?:, eta ([0-9.]+) s)?")


class Heard(NamedTuple):
    told: list[tuple[float, int, float | None]]
    """Time, position and expected wait."""
    began_at: float
    text: str


async def listen(client: httpx.AsyncClient, url: str, beginning: int, num_tokens: int) -> Heard:
    now = asyncio.get_running_loop().time
    body = {
        "model": MODEL,
        "prompt": [beginning, 1, 2, 3],
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "stream": True,
    }
    told: list[tuple[float, int, float | None]] = []
    began_at, text = 0.0, ""
    async with client.stream("POST", f"{url}/v1/completions", json=body) as reply:
        assert reply.status_code == 200, await reply.aread()
        async for line in reply.aiter_lines():
            if found := REPORT.match(line):
                told.append((now(), int(found[1]), float(found[2]) if found[2] else None))
            elif line.startswith("data: {"):
                began_at = began_at or now()
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
    assert "[DONE]" in line or not line
    return Heard(told, began_at, text)


async def crowd(system: Launched, count: int) -> list[Heard]:
    """Requests one after the other, to both routers in turn. Most have the same beginning, and so share a partition of
    the queue; the last third are in others, where nobody is ahead of them."""
    urls = [f"http://127.0.0.1:{system.port + index}" for index in range(2)]
    async with httpx.AsyncClient(timeout=120.0, trust_env=False, headers={"User-Agent": "curl/8"}) as client:
        tasks = []
        for number in range(count):
            beginning = BEGINNING + (number if number >= 2 * count // 3 else 0)
            tasks.append(asyncio.create_task(listen(client, urls[number % 2], beginning, 20 + number % 3)))
            await asyncio.sleep(0.1)
        return await asyncio.gather(*tasks)


async def test_places_and_waits_are_true_and_hopeless_calls_are_refused(tmp_path: Path) -> None:
    arguments = ["--sim", "--routers", "2", "--max-sequences", str(NUM_PLACES), "--no-autoscaler"]
    environment = {"HEADRACE_TIMING_SLOWDOWN": "6", "HEADRACE_QUEUE_REPORT_INTERVAL_S": "0.25"}
    with launched(tmp_path, *arguments, environment=environment) as system:
        await crowd(system, 4)  # the routers learn what the worker can do
        heard = await crowd(system, 12)
        assert all(each.text for each in heard)
        # They began in the order in which they came, and nobody was told to stand further back, but for those whom the
        # other router had just let in.
        order = sorted(range(12), key=lambda number: heard[number].began_at)
        assert all(abs(place - number) <= NUM_PLACES for place, number in enumerate(order)), order
        for each in heard:
            positions = [position for _, position, _ in each.told]
            assert all(after <= before + NUM_PLACES for before, after in itertools.pairwise(positions)), positions
        last = heard[-1].told[-1][1]
        assert last <= 2 * NUM_PLACES, "it was told how far it had come"
        assert max(position for each in heard for _, position, _ in each.told) >= 6, "both routers' requests count"
        errors = [
            abs(eta - (each.began_at - at)) / (each.began_at - at)
            for each in heard
            for at, _, eta in each.told
            if eta is not None and each.began_at - at >= 0.5
        ]
        assert len(errors) >= 5 and median(errors) < 0.6, errors

        async with httpx.AsyncClient(timeout=60.0, trust_env=False) as client:
            waiting = [asyncio.create_task(listen(client, system.url, BEGINNING, 60)) for _ in range(8)]
            await asyncio.sleep(1.0)
            body = {"model": MODEL, "prompt": "Hello", "max_tokens": 4}
            other = f"http://127.0.0.1:{system.port + 1}"
            refused = await client.post(f"{other}/v1/completions", json=body, headers={"Headrace-Timeout": "1"})
            assert refused.status_code == 503, refused.text
            assert refused.json()["error"]["code"] == "deadline_unreachable"
            assert 1 <= int(refused.headers["retry-after"]) <= 120
            assert all(each.text for each in await asyncio.gather(*waiting))
            metrics = (await client.get(f"{system.url}/metrics")).text
            assert f'headrace_router_wait_error_ratio_count{{model="{MODEL}"}}' in metrics
