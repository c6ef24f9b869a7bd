"""Every call is counted once, under how it ended; what was counted for single calls adds up to the totals."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.integration.deployment import Client, Deployment, until, until_status

pytestmark = [pytest.mark.nats, pytest.mark.timeout(600)]

PATH = "/v1/completions"


def body_of(script: dict[str, Any], max_tokens: int = 8, **more: Any) -> dict[str, Any]:
    return {"model": "scripted", "prompt": json.dumps(script), "max_tokens": max_tokens, **more}


class Figures:
    def __init__(self, text: str) -> None:
        self._samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]

    def sum(self, name: str, **labels: str) -> float:
        return sum(
            sample.value for sample in self._samples if sample.name == name and labels.items() <= sample.labels.items()
        )

    def by(self, name: str, label: str) -> dict[str, float]:
        found: dict[str, float] = {}
        for sample in self._samples:
            if sample.name == name and sample.value:
                found[sample.labels[label]] = found.get(sample.labels[label], 0.0) + sample.value
        return found


async def stay_until_tokens(http: httpx.AsyncClient, gone: asyncio.Event) -> None:
    """A stream that is left after some tokens, when told to."""
    async with http.stream("POST", PATH, json=body_of({"echo": "ab"}, 1200, stream=True)) as reply:
        lines = reply.aiter_lines()
        for _ in range(6):
            await anext(lines)
        await gone.wait()


async def leave_the_queue(http: httpx.AsyncClient) -> None:
    with pytest.raises(httpx.ReadTimeout):
        await http.post(PATH, json=body_of({"echo": "ab"}, 1200), timeout=httpx.Timeout(10, read=0.7))


async def test_each_call_has_one_outcome(deployment: Deployment, client: Client) -> None:
    """With sequences that are preempted, a worker that is killed, and messages that are delivered twice."""
    url = await deployment.router(model="scripted")
    await deployment.scheduler("scheduler-1", reattach_timeout_s=30)
    worker: dict[str, Any] = {"engine": "tests.scripted_text", "step_s": 0.01, "max_sequences": 4, "num_blocks": 96}
    await deployment.worker("worker-1", **worker)
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        await until_status(http, "/health", 200)
        # Four that hold all places, three behind them that never get one.
        gone = asyncio.Event()
        staying = [asyncio.create_task(stay_until_tokens(http, gone)) for _ in range(4)]
        await until(lambda: client.gauge("worker-1", "num_running") == 4, what="four streams")
        await asyncio.gather(*(leave_the_queue(http) for _ in range(3)))
        gone.set()
        await asyncio.gather(*staying)
        # Ten that share too few blocks, and lose their worker on the way.
        calls = [http.post(PATH, json=body_of({"text": "x" * 200, "pad": "y" * 200}, 400)) for _ in range(10)]
        finishing = [asyncio.create_task(call) for call in calls]
        await until(lambda: (client.gauge("worker-1", "num_running") or 0) >= 4, what="load")
        await deployment.worker("worker-2", **worker)
        await until(lambda: "worker-2" in client.telemetry and client.telemetry["worker-2"].state == "ready")
        await deployment.kill("worker-1")
        replies = await asyncio.gather(*finishing)
        assert {reply.json()["choices"][0]["finish_reason"] for reply in replies} == {"stop"}
        for _ in range(5):
            reply = await http.post(PATH, json=body_of({"echo": "ab"}, 5))
            assert reply.json()["choices"][0]["finish_reason"] == "length"
        assert (await http.post(PATH, json=body_of({}, max_tokens=0))).status_code == 400
        assert (await http.post(PATH, json=body_of({}) | {"model": "no-such"})).status_code == 404
        assert (await http.post(PATH, json=body_of({"echo": "ab", "fail_at": 3}, 9))).status_code == 500
        await until_status(http, "/health", 200)
        figures = Figures((await http.get("/metrics")).text)

    assert figures.by("headrace_calls_total", "outcome") == {
        "stop": 10,
        "length": 5,
        "cancelled": 7,
        "error": 1,
        "rejected": 2,
    }
    assert figures.by("vllm:request_success_total", "finished_reason") == {
        "stop": 10,
        "length": 5,
        "abort": 7,
        "error": 1,
    }
    assert set(figures.by("headrace_calls_total", "model")) == {"scripted", "unknown"}
    for name in ("gen_ai_server_time_to_first_token_seconds_count", "vllm:time_to_first_token_seconds_count"):
        assert figures.sum(name) == 10 + 5 + 4 + 1, name
    for single, total in (
        ("vllm:request_prompt_tokens_sum", "vllm:prompt_tokens_total"),
        ("vllm:request_generation_tokens_sum", "vllm:generation_tokens_total"),
        ("vllm:request_prompt_tokens_sum", "headrace_prompt_tokens_total"),
        ("vllm:request_generation_tokens_sum", "headrace_output_tokens_total"),
    ):
        assert figures.sum(single) == figures.sum(total) > 0, (single, total)
    assert figures.sum("vllm:e2e_request_latency_seconds_count") == 10 + 5 + 7 + 1
    assert figures.sum("headrace_requests_inflight") == 0
