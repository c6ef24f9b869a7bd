"""What users do first, with the client they use."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.broker_view import broker_view
from tests.e2e.launcher import Launched
from tests.e2e.metrics import wait_for_metric

pytestmark = [pytest.mark.model, pytest.mark.e2e, pytest.mark.nats]

QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."


@pytest.fixture
async def client(system: Launched) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{system.url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_chat_answers(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="smollm2-135m", messages=QUESTION, temperature=0)
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.completion_tokens > 5


async def test_chat_streams_the_same_answer(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="smollm2-135m",
        messages=QUESTION,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == ANSWER
    assert len(chunks) > 5
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == [] and chunks[-1].usage is not None


async def test_models_are_listed(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["smollm2-135m"]


async def test_tiny_temperatures_are_greedy(client: openai.AsyncOpenAI) -> None:
    async def text(temperature: float) -> str | None:
        answer = await client.chat.completions.create(
            model="smollm2-135m",
            messages=QUESTION,
            temperature=temperature,
            max_tokens=16,
            seed=3,
        )
        return answer.choices[0].message.content

    greedy = await text(0)
    assert [await text(value) for value in (1e-4, 1e-5, 1e-6, 1e-9)] == [greedy] * 4


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_client_that_leaves_stops_the_computation(system: Launched, streaming: bool) -> None:
    body = {"model": "smollm2-135m", "prompt": "Count:", "max_tokens": 900, "ignore_eos": True, "stream": streaming}
    async with httpx.AsyncClient(base_url=system.url, timeout=60) as client:
        if streaming:
            async with client.stream("POST", "/v1/completions", json=body) as response:
                lines = response.aiter_lines()
                for _ in range(5):
                    await anext(lines)
        else:
            with pytest.raises(httpx.ReadTimeout):
                await client.post("/v1/completions", json=body, timeout=2)
    await wait_for_metric(system, "scheduler", "headrace_sequences_running", 0)
    await wait_for_metric(system, "scheduler", "headrace_blocks_referenced", 0)
    async with broker_view(system) as broker:
        assert await broker.num_queued() == 0
