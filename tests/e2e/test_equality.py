"""Greedy answers through the whole system equal transformers', token for token.

HEADRACE_PROMPTS=all asks all 32 prompts in each system, at once and each alone; by default a part of them.
"""

import asyncio
import functools
import os
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch

from headrace_shared.messages import TokenFrame
from tests import prompts
from tests.e2e.broker_view import broker_view
from tests.e2e.launcher import Launched, launched
from tests.e2e.metrics import metric
from tests.reference import Miss, Reference

pytestmark = [pytest.mark.model, pytest.mark.e2e, pytest.mark.nats, pytest.mark.timeout(600)]

PLAIN, SMALL = "plain", "small pool without a prefix cache"
"""A small pool with one is in `test_model_cases`."""
NUM_TOKENS = {PLAIN: 16, SMALL: 64}
"""New tokens. Only answers longer than their admission's horizon of two blocks can run out of blocks."""
ALL = prompts.SHORT + prompts.UNICODE + prompts.LONG
TAKES_ALL = os.environ.get("HEADRACE_PROMPTS") == "all"
PROMPTS = {
    PLAIN: ALL if TAKES_ALL else prompts.SHORT + prompts.UNICODE + prompts.LONG[:4],
    SMALL: ALL if TAKES_ALL else prompts.SHORT[::2] + prompts.UNICODE[::2] + prompts.LONG[4:7],
}
TIE = 1e-3
"""Logits closer than this may swap places by rounding alone (float32, another summation order)."""


@functools.cache
def reference() -> Reference:
    return Reference()


@pytest.fixture(scope="module", params=[PLAIN, SMALL])
def system(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Launched]]:
    environment = {"HEADRACE_DTYPE": "float32", "HEADRACE_CONTEXT": "1024"}
    if request.param == SMALL:
        # 80 blocks of 16: two of the long prompts fill it, while 15 requests want to run.
        environment |= {"HEADRACE_NUM_BLOCKS": "80", "HEADRACE_PREFIX_CACHING": "false"}
    with launched(tmp_path_factory.mktemp("system"), "--no-autoscaler", environment=environment) as launched_system:
        yield request.param, launched_system


async def complete(client: httpx.AsyncClient, prompt_ids: list[int], num_tokens: int) -> dict[str, Any]:
    body = {
        "model": "smollm2-135m",
        "prompt": prompt_ids,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


@functools.cache
def misses_of(prompt_ids: tuple[int, ...], output_ids: tuple[int, ...]) -> list[Miss]:
    return reference().misses(prompt_ids, output_ids)


async def check(system: Launched, answers: list[dict[str, Any]], encoded: list[list[int]], num_tokens: int) -> None:
    """Each answer's tokens, as the token log has them, are the reference's choices."""
    outputs: dict[str, list[int]] = defaultdict(list)
    async with broker_view(system) as broker:
        for _, event in await broker.token_log():
            if isinstance(event, TokenFrame):
                assert event.index == len(outputs[event.request_id])
                outputs[event.request_id].extend(event.tokens)
    for answer, prompt_ids in zip(answers, encoded, strict=True):
        output = outputs[answer["id"].removeprefix("cmpl-")]
        assert len(output) == num_tokens == answer["usage"]["completion_tokens"]
        assert reference().tokenizer.decode(output, skip_special_tokens=True) == answer["choices"][0]["text"]
        misses = misses_of(tuple(prompt_ids), tuple(output))
        assert all(miss.gap < TIE for miss in misses), (answer, misses)


async def test_answers_equal_the_reference(system: tuple[str, Launched]) -> None:
    name, launched_system = system
    encoded = [reference().ids(prompt) for prompt in PROMPTS[name]]
    few = encoded if TAKES_ALL else encoded[::3]
    num_tokens = NUM_TOKENS[name]
    async with httpx.AsyncClient(base_url=launched_system.url, timeout=300) as client:
        answers = await asyncio.gather(*(complete(client, prompt_ids, num_tokens) for prompt_ids in encoded))
        again = [await complete(client, prompt_ids, num_tokens) for prompt_ids in few]  # each alone
    await check(launched_system, answers + again, encoded + few, num_tokens)
    cached = sum(answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in again)
    assert (cached > 0) == (name == PLAIN), cached
    preemptions = await metric(launched_system, "scheduler", "headrace_preemptions_total")
    assert (preemptions > 0) == (name == SMALL), preemptions


async def test_choices_differ_and_repeat_with_their_seed(system: tuple[str, Launched]) -> None:
    _, launched_system = system
    body = {
        "model": "smollm2-135m",
        "messages": [{"role": "user", "content": "Tell me a story about a fox and a mill."}],
        "n": 4,
        "seed": 7,
        "temperature": 1,
        "max_tokens": 16,
    }

    async with httpx.AsyncClient(base_url=launched_system.url, timeout=120) as client:

        async def texts() -> list[str]:
            answer = (await client.post("/v1/chat/completions", json=body)).json()
            assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
            return [choice["message"]["content"] for choice in answer["choices"]]

        first, second = await asyncio.gather(texts(), texts())
    assert len(set(first)) > 1
    assert first == second


async def test_prompts_are_scored_as_the_reference_scores_them(system: tuple[str, Launched]) -> None:
    """As evaluations ask for it: nothing but the log-probabilities of the prompt, many prompts in a call, and again
    when all of them could come from the cache."""
    _, launched_system = system
    encoded = [reference().ids(prompt) for prompt in prompts.SHORT[:4] + prompts.LONG[3:4]]
    body = {"model": "smollm2-135m", "prompt": encoded, "max_tokens": 0, "echo": True, "logprobs": 1}
    async with httpx.AsyncClient(base_url=launched_system.url, timeout=300) as client:
        first = (await client.post("/v1/completions", json=body)).json()
        again = (await client.post("/v1/completions", json=body)).json()
    for answer in (first, again):
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        for choice, prompt_ids in zip(answer["choices"], encoded, strict=True):
            assert choice["text"] == reference().tokenizer.decode(prompt_ids) and choice["finish_reason"] == "length"
            told = choice["logprobs"]
            expected, likeliest = scores_of(tuple(prompt_ids))
            assert told["token_logprobs"][0] is None and len(told["tokens"]) == len(prompt_ids)
            assert told["token_logprobs"][1:] == pytest.approx(expected, abs=2e-3)
            assert [max(top.values()) for top in told["top_logprobs"][1:]] == pytest.approx(likeliest, abs=2e-3)


@functools.cache
def scores_of(prompt_ids: tuple[int, ...]) -> tuple[list[float], list[float]]:
    """Of all tokens but the first: their log-probabilities, and those of the likeliest tokens in their places."""
    with torch.inference_mode():
        logprobs = torch.log_softmax(reference().model(torch.tensor([prompt_ids])).logits[0, :-1], -1)
    own = logprobs.gather(-1, torch.tensor(prompt_ids[1:])[:, None]).squeeze(-1)
    return own.tolist(), logprobs.amax(-1).tolist()
