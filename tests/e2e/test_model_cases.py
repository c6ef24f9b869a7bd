"""Cases about the engine and its cache that need a real model.

In float32, so that the composition of a batch changes no answer by its rounding.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Iterator
from typing import Any, NamedTuple

import httpx
import pytest

from tests import prompts
from tests.e2e.api import CHAT, MODEL, TEXT, Answer, ask
from tests.e2e.launcher import Launched, launched
from tests.e2e.metrics import metric, wait_for_metric

pytestmark = [pytest.mark.model, pytest.mark.e2e, pytest.mark.nats, pytest.mark.timeout(600)]

NUM_BLOCKS = 1024
FLOAT32 = {"HEADRACE_DTYPE": "float32", "HEADRACE_CONTEXT": "1024"}
STORY = "Tell me a story about a fox and a mill."


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    """A system whose cache is larger than anything here needs."""
    environment = FLOAT32 | {"HEADRACE_NUM_BLOCKS": str(NUM_BLOCKS)}
    with launched(tmp_path_factory.mktemp("roomy"), "--no-autoscaler", environment=environment) as system:
        yield system


@pytest.fixture
async def client(roomy: Launched) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=roomy.url, timeout=120) as client:
        yield client
        await wait_for_metric(roomy, "scheduler", "headrace_blocks_free", NUM_BLOCKS)


async def test_tiny_temperatures_are_greedy_and_harm_no_neighbour(client: httpx.AsyncClient) -> None:
    neighbour: dict[str, Any] = {"temperature": 1, "seed": 11, "max_tokens": 8}
    alone = await ask(client, CHAT, "Name three rivers.", **neighbour)
    greedy = await ask(client, CHAT, STORY, temperature=0, max_tokens=8)
    for temperature in (1e-3, 1e-4, 1e-6, 1e-9):
        fields: dict[str, Any] = {"temperature": temperature, "seed": 3, "max_tokens": 8}
        fields |= {"logprobs": True, "top_logprobs": 3}
        answer, beside = await asyncio.gather(
            ask(client, CHAT, STORY, **fields), ask(client, CHAT, "Name three rivers.", **neighbour)
        )
        assert answer.text == greedy.text or temperature > 1e-4
        told = answer.choices[0].logprobs
        values = [top["logprob"] for token in told for top in (token, *token["top_logprobs"])]
        assert len(values) == 32 and all(math.isfinite(value) for value in values)
        assert beside.text == alone.text


async def test_choices_of_one_seed_differ_and_repeat(client: httpx.AsyncClient) -> None:
    """Whole, again, and as a stream in which a stop string ends one choice early."""
    fields: dict[str, Any] = {"n": 4, "seed": 7, "temperature": 1, "max_tokens": 24}
    first, second = [await ask(client, CHAT, STORY, **fields) for _ in range(2)]
    assert sorted(first.choices) == [0, 1, 2, 3]
    texts = [first.choices[index].text for index in range(4)]
    assert len(set(texts)) == 4
    assert first.outcome() == second.outcome()
    stop = texts[2][40:52]
    assert not any(stop in text for index, text in enumerate(texts) if index != 2)
    for stream in (False, True):
        stopped = await ask(client, CHAT, STORY, stream, stop=stop, **fields)
        expected = first.outcome() | {2: (texts[2][: texts[2].index(stop)], "stop")}
        assert stopped.outcome() == expected
        assert all(choice.num_finishes == 1 for choice in stopped.choices.values())
        assert first.usage is not None and stopped.usage is not None
        assert stopped.usage["completion_tokens"] < first.usage["completion_tokens"]


async def test_requests_at_once_share_a_prefix_only_once_it_is_computed(client: httpx.AsyncClient) -> None:
    """Six at once on a cold cache. Alone, each has a salt of its own, so that nothing is cached. That freed
    memory may hold NaN is shown in tests/worker/test_engine.py."""
    prefix = [1000 + 7 * number for number in range(120)]
    prompts = [[*prefix, *range(3000 + 10 * number, 3006 + 10 * number)] for number in range(6)]
    fields: dict[str, Any] = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}
    together = await asyncio.gather(*(ask(client, TEXT, prompt, **fields) for prompt in prompts))
    again = await asyncio.gather(*(ask(client, TEXT, prompt, **fields) for prompt in prompts))
    for number, (answer, cached) in enumerate(zip(together, again, strict=True)):
        alone = await ask(client, TEXT, prompts[number], cache_salt=f"alone-{number}", **fields)
        assert _num_cached(alone) == 0 and _num_cached(cached) >= 112
        assert answer.outcome() == cached.outcome() == alone.outcome()


async def test_choices_share_a_partly_filled_block(client: httpx.AsyncClient) -> None:
    """37 tokens in blocks of 16."""
    prompt = list(range(2000, 2037))
    greedy: dict[str, Any] = {"temperature": 0, "max_tokens": 20}
    one = await ask(client, TEXT, prompt, **greedy)
    three = await ask(client, TEXT, prompt, n=3, cache_salt="three", **greedy)
    assert three.outcome() == dict.fromkeys(range(3), one.outcome()[0])
    sampled: dict[str, Any] = {"temperature": 1, "seed": 7, "max_tokens": 20}
    alone = [await ask(client, TEXT, prompt, cache_salt=f"alone-{run}", **sampled) for run in range(2)]
    free = await ask(client, TEXT, prompt, n=3, cache_salt="free", **sampled)
    assert all(run.outcome()[0] == free.outcome()[0] for run in alone)
    cut_text = free.choices[1].text
    stop = cut_text[len(cut_text) // 2 :][:8]
    cut = await ask(client, TEXT, prompt, True, n=3, stop=stop, cache_salt="cut", **sampled)
    for index, (text, finish) in free.outcome().items():
        expected = (text.split(stop)[0], "stop") if stop in text else (text, finish)
        assert cut.outcome()[index] == expected
    assert cut.finish != "stop" or cut.choices[2].finish != "stop"


class Way(NamedTuple):
    fields: dict[str, Any]
    has_stop: bool = False


WAYS = {
    "seed 7": Way({"temperature": 1, "seed": 7}),
    "penalty and stop string": Way({"temperature": 0, "repetition_penalty": 1.3}, has_stop=True),
}
NUM_PROMPT = 32
NUM_TOKENS = 48
NUM_BLOCKS_OF_SMALL = 8
"""An answer and its prompt take five; a sequence is let in with four, so that two of them want more than there are."""
TEXTS = prompts.LONG[:2]


def _fields(way: Way, number: int, stops: dict[int, str]) -> dict[str, Any]:
    stop = {"stop": stops[number]} if way.has_stop else {}
    return {"max_tokens": NUM_TOKENS, "ignore_eos": True, "skip_special_tokens": False, **way.fields, **stop}


async def _prompts(client: httpx.AsyncClient) -> list[list[int]]:
    replies = [await client.post("/tokenize", json={"model": MODEL, "prompt": text}) for text in TEXTS]
    return [reply.json()["tokens"][:NUM_PROMPT] for reply in replies]


Alone = dict[str, tuple[list[Answer], dict[int, str]]]


@pytest.fixture(scope="module")
def alone(roomy: Launched) -> Alone:
    """What each prompt gives by itself, and a stop string for each that spans most of its answer."""

    async def run() -> Alone:
        async with httpx.AsyncClient(base_url=roomy.url, timeout=120) as client:
            found: Alone = {}
            for name, way in WAYS.items():
                stops: dict[int, str] = {}
                given = list(enumerate(await _prompts(client)))
                if way.has_stop:
                    for number, prompt in given:
                        text = (await ask(client, TEXT, prompt, **_fields(Way(way.fields), number, {}))).text
                        stops[number] = text[len(text) // 4 : -len(text) // 8]
                answers = [await ask(client, TEXT, prompt, **_fields(way, number, stops)) for number, prompt in given]
                found[name] = (answers, stops)
            return found

    return asyncio.run(run())


@pytest.mark.parametrize(("prefix_caching", "ways"), [("true", list(WAYS)), ("false", ["seed 7"])])
async def test_preempted_answers_are_those_of_a_run_alone(
    alone: Alone, tmp_path_factory: pytest.TempPathFactory, prefix_caching: str, ways: list[str]
) -> None:
    """Twice five blocks in a pool of eight."""
    environment = FLOAT32 | {"HEADRACE_NUM_BLOCKS": str(NUM_BLOCKS_OF_SMALL), "HEADRACE_PREFIX_CACHING": prefix_caching}
    folder = tmp_path_factory.mktemp("small")
    with launched(folder, "--no-autoscaler", environment=environment) as small:
        async with httpx.AsyncClient(base_url=small.url, timeout=120) as client:
            before = 0.0
            given = await _prompts(client)
            assert [len(prompt) for prompt in given] == [NUM_PROMPT] * len(TEXTS)
            for name in ways:
                expected, stops = alone[name]
                answers = await asyncio.gather(
                    *(
                        ask(client, TEXT, prompt, True, **_fields(WAYS[name], number, stops))
                        for number, prompt in enumerate(given)
                    )
                )
                assert [answer.outcome() for answer in answers] == [answer.outcome() for answer in expected], name
                assert [_usage(answer) for answer in answers] == [_usage(answer) for answer in expected], name
                if WAYS[name].has_stop:
                    assert {answer.finish for answer in answers} == {"stop"}
                await asyncio.sleep(1.2)  # the scheduler's figures are a second old
                preemptions = await metric(small, "scheduler", "headrace_preemptions_total")
                assert preemptions > before, name
                before = preemptions
        await wait_for_metric(small, "scheduler", "headrace_blocks_free", NUM_BLOCKS_OF_SMALL)


def _usage(answer: Answer) -> tuple[int, int]:
    assert answer.usage is not None
    return answer.usage["prompt_tokens"], answer.usage["completion_tokens"]


def _num_cached(answer: Answer) -> int:
    assert answer.usage is not None
    cached: int = answer.usage["prompt_tokens_details"]["cached_tokens"]
    return cached
