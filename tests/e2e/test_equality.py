"""Greedy answers through the whole system equal transformers', token for token."""

import asyncio
import functools
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests import prompts
from tests.e2e.launcher import Launched, launched
from tests.reference import Continuation, Reference

pytestmark = [pytest.mark.model, pytest.mark.e2e, pytest.mark.nats, pytest.mark.timeout(420)]

NUM_TOKENS = 20
TIE = 1e-3
"""Logits closer than this may swap places by rounding alone (float32, another summation order)."""


@functools.cache
def reference() -> Reference:
    return Reference()


@functools.cache
def expected() -> tuple[tuple[list[int], Continuation], ...]:
    model = reference()
    encoded = [model.ids(prompt) for prompt in prompts.ALL]
    return tuple((ids, model.generate(ids, NUM_TOKENS)) for ids in encoded)


@pytest.fixture(scope="module", params=["plain", "no prefix cache", "small pool"])
def system(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Launched]]:
    expected()  # computed before the system competes for the processor
    environment = {"HEADRACE_DTYPE": "float32", "HEADRACE_CONTEXT": "1024"}
    if request.param == "no prefix cache":
        environment["HEADRACE_PREFIX_CACHE"] = "false"
    if request.param == "small pool":
        # 80 blocks of 16: two of the long prompts fill it, while 32 requests want to run.
        environment["HEADRACE_NUM_BLOCKS"] = "80"
    with launched(tmp_path_factory.mktemp("system"), "--no-autoscaler", environment=environment) as launched_system:
        yield request.param, launched_system


async def complete(client: httpx.AsyncClient, prompt_ids: list[int]) -> dict[str, Any]:
    body = {
        "model": "smollm2-135m",
        "prompt": prompt_ids,
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "logprobs": 1,
    }
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def check(answer: dict[str, Any], continuation: Continuation) -> None:
    choice = answer["choices"][0]
    assert answer["usage"]["completion_tokens"] == NUM_TOKENS
    if choice["text"] == continuation.text:
        return
    decoded = [reference().tokenizer.decode([token]) for token in continuation.ids]
    pairs = zip(choice["logprobs"]["tokens"], decoded, strict=True)
    first = next(index for index, (ours, theirs) in enumerate(pairs) if ours != theirs)
    gap = continuation.gaps[first]
    assert gap < TIE, f"token {first} differs where the reference's best logit leads by {gap}: {choice['text']!r}"


async def test_answers_equal_the_reference_alone(system: tuple[str, Launched]) -> None:
    name, launched_system = system
    if name != "plain":
        pytest.skip("alone, a small pool and a missing prefix cache make no difference")
    async with httpx.AsyncClient(base_url=launched_system.url, timeout=120) as client:
        for prompt_ids, continuation in expected():
            check(await complete(client, prompt_ids), continuation)


async def test_answers_equal_the_reference_all_at_once(system: tuple[str, Launched]) -> None:
    name, launched_system = system
    async with httpx.AsyncClient(base_url=launched_system.url, timeout=300, limits=httpx.Limits()) as client:
        answers = await asyncio.gather(*(complete(client, prompt_ids) for prompt_ids, _ in expected()))
        again = await asyncio.gather(*(complete(client, prompt_ids) for prompt_ids, _ in expected()))
    for answer, (_, continuation) in zip(answers + again, expected() * 2, strict=True):
        check(answer, continuation)
    cached = sum(answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in again)
    assert (cached == 0) == (name == "no prefix cache"), cached
    preemptions = await scheduler_metric(launched_system, "headrace_preemptions_total")
    assert (preemptions > 0) == (name == "small pool"), preemptions


async def test_choices_differ_and_repeat_with_their_seed(system: tuple[str, Launched]) -> None:
    _, launched_system = system
    body = {
        "model": "smollm2-135m",
        "messages": [{"role": "user", "content": "Tell me a story about a fox and a mill."}],
        "n": 4,
        "seed": 7,
        "temperature": 1,
        "max_tokens": 24,
    }

    async with httpx.AsyncClient(base_url=launched_system.url, timeout=120) as client:

        async def texts() -> list[str]:
            answer = (await client.post("/v1/chat/completions", json=body)).json()
            assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
            return [choice["message"]["content"] for choice in answer["choices"]]

        first, second = await asyncio.gather(texts(), texts())
    assert len(set(first)) > 1
    assert first == second


async def scheduler_metric(system: Launched, name: str) -> float:
    port = system.processes("scheduler")[0]["health_port"]
    async with httpx.AsyncClient() as client:
        text = (await client.get(f"http://127.0.0.1:{port}/metrics")).text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return sum(sample.value for sample in samples if sample.name == name)
