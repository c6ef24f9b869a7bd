"""Two models side by side, and the smaller one that answers for the larger one where that is allowed."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.launcher import launched
from tests.reference import builtin_gguf

pytestmark = [pytest.mark.e2e, pytest.mark.nats, pytest.mark.timeout(600)]

LARGE, SMALL = "smollm2-135m", "small"
WEIGHTS = builtin_gguf()


async def ask(client: httpx.AsyncClient, model: str, num_tokens: int = 4, **fields: Any) -> httpx.Response:
    body = {"model": model, "prompt": "Hello", "max_tokens": num_tokens, "ignore_eos": True, **fields}
    return await client.post("/v1/completions", json=body)


async def test_each_answers_and_the_small_one_takes_over(tmp_path: Path) -> None:
    small = tmp_path / f"{SMALL}.gguf"
    small.symlink_to(WEIGHTS)
    arguments = ["--sim", "--model", LARGE, "--model", f"{small}=2", "--max-sequences", "2", "--no-autoscaler"]
    environment = {
        "HEADRACE_TIMING_SLOWDOWN": "6",
        "HEADRACE_OVERFLOW": f"{LARGE}={SMALL}",
        "HEADRACE_OVERFLOW_ABOVE_S": "1.0",
        "HEADRACE_OVERFLOW_BELOW_S": "0.5",
    }
    with launched(tmp_path, *arguments, environment=environment) as system:
        assert [entry["model"] for entry in system.processes("worker")] == [LARGE, SMALL, SMALL]
        assert [entry["model"] for entry in system.processes("scheduler")] == [LARGE, SMALL]
        async with httpx.AsyncClient(base_url=system.url, timeout=60.0, trust_env=False) as client:
            listed = (await client.get("/v1/models")).json()["data"]
            assert [model["id"] for model in listed] == [SMALL, LARGE]
            for model in (LARGE, SMALL):
                reply = await ask(client, model)
                assert reply.status_code == 200
                assert reply.json()["model"] == reply.headers["headrace-model"] == model
            assert (await ask(client, "medium")).status_code == 404
            await asyncio.sleep(4.0)  # the workers say once a second what they have done
            crowd = [asyncio.create_task(ask(client, LARGE, 60)) for _ in range(8)]
            await asyncio.sleep(1.5)  # every router's forecast has them
            allowed = await ask(client, LARGE, overflow=True)
            assert allowed.status_code == 200
            assert allowed.json()["model"] == allowed.headers["headrace-model"] == SMALL
            assert {(await task).json()["model"] for task in crowd} == {LARGE}
            counted = f'headrace_router_overflow_total{{answered_by="{SMALL}",model="{LARGE}"}} 1.0'
            assert counted in (await client.get("/metrics")).text
