"""OpenAI's client in all the ways it is used, against a running system with scripted answers."""

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.e2e.api import MODEL
from tests.e2e.launcher import Launched
from tests.scripted_text import END

pytestmark = [pytest.mark.e2e, pytest.mark.nats]

SAID = "Grüße, 世界 🦉"
NUM_SAID = len(SAID.encode()) + 1


class Weather(BaseModel):
    """A forecast."""

    city: Literal["Paris", "Rome"]
    days: int


CALL = '<tool_call>\n{"name": "Weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'


def user(script: dict[str, Any]) -> Any:
    return [{"role": "user", "content": json.dumps(script, ensure_ascii=False)}]


@pytest.fixture
def client(scripted: Launched) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def asynchronous(scripted: Launched) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{scripted.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_chats_and_texts(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=user({"text": SAID}), max_completion_tokens=100)
    assert answer.object == "chat.completion" and answer.model == MODEL
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", SAID, "stop")
    assert answer.usage is not None and answer.usage.completion_tokens == NUM_SAID
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + NUM_SAID
    with client.chat.completions.create(
        model=MODEL, messages=user({"text": SAID}), stream=True, stream_options={"include_usage": True}
    ) as stream:
        chunks = list(stream)
    assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == SAID
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == NUM_SAID
    completion = client.completions.create(
        model=MODEL, prompt=[json.dumps({"text": "one"}), json.dumps({"text": "two"})], n=2, logprobs=2
    )
    assert [(choice.index, choice.text) for choice in completion.choices] == [
        (0, "one"),
        (1, "one"),
        (2, "two"),
        (3, "two"),
    ]
    assert completion.choices[0].logprobs is not None and completion.choices[0].logprobs.tokens is not None
    assert completion.choices[0].logprobs.tokens[:3] == ["o", "n", "e"]
    pieces = client.completions.create(model=MODEL, prompt=json.dumps({"text": SAID}), max_tokens=100, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == SAID


def test_models(client: openai.OpenAI) -> None:
    [model] = client.models.list()
    assert model.id == MODEL and model == client.models.retrieve(MODEL)
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")


def test_parameters_that_the_client_has_no_name_for(client: openai.OpenAI) -> None:
    extra: dict[str, Any] = {"ignore_eos": True, "top_k": 5, "min_tokens": 3, "something_new": 1}
    answer = client.chat.completions.create(
        model=MODEL, messages=user({"text": "ab"}), max_tokens=6, logit_bias={str(END): 1}, extra_body=extra
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None and answer.usage.completion_tokens == 6


async def test_the_stream_helper_tells_of_content_and_of_its_ends(asynchronous: openai.AsyncOpenAI) -> None:
    kinds = []
    async with asynchronous.chat.completions.stream(
        model=MODEL,
        messages=user({"choices": [SAID, "two"]}),
        n=2,
        logprobs=True,
        top_logprobs=2,
        stream_options={"include_usage": True},
    ) as stream:
        text = ""
        async for event in stream:
            kinds.append(event.type)
            if event.type == "content.delta":
                text = max(text, event.snapshot, key=len)
        final = await stream.get_final_completion()
    assert text == SAID
    assert [choice.message.content for choice in final.choices] == [SAID, "two"]
    assert [choice.finish_reason for choice in final.choices] == ["stop", "stop"]
    assert {"chunk", "content.delta", "content.done", "logprobs.content.delta", "logprobs.content.done"} <= set(kinds)
    assert kinds.count("content.done") == 2
    assert final.choices[0].logprobs is not None and final.choices[0].logprobs.content is not None
    assert b"".join(bytes(token.bytes or []) for token in final.choices[0].logprobs.content).startswith(SAID.encode())
    assert final.usage is not None and final.usage.completion_tokens == NUM_SAID + 4


async def test_answers_become_objects(client: openai.OpenAI, asynchronous: openai.AsyncOpenAI) -> None:
    """Whether the model keeps to the form is shown with a real one, in `test_structured_output.py`."""
    messages = user({"text": '{"city": "Rome", "days": 3}'})
    parsed = client.chat.completions.parse(model=MODEL, messages=messages, response_format=Weather, max_tokens=100)
    assert parsed.choices[0].message.parsed == Weather(city="Rome", days=3)
    async with asynchronous.chat.completions.stream(
        model=MODEL, messages=messages, response_format=Weather, max_tokens=100
    ) as stream:
        partial = [event.parsed async for event in stream if event.type == "content.delta"]
        final = await stream.get_final_completion()
    assert final.choices[0].message.parsed == Weather(city="Rome", days=3)
    assert {"city": "Rome"} in partial
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model=MODEL, messages=messages, response_format=Weather, max_tokens=5)


async def test_functions_that_are_described_by_classes(client: openai.OpenAI, asynchronous: openai.AsyncOpenAI) -> None:
    tools: Any = [openai.pydantic_function_tool(Weather)]
    asked: dict[str, Any] = {"model": MODEL, "messages": user({"text": CALL}), "tools": tools, "max_tokens": 500}
    message = client.chat.completions.parse(**asked).choices[0].message
    assert message.tool_calls is not None
    assert message.tool_calls[0].function.parsed_arguments == Weather(city="Rome", days=2)
    async with asynchronous.chat.completions.stream(**asked) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_completion()
    deltas = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
    assert "".join(event.arguments_delta for event in deltas) == message.tool_calls[0].function.arguments
    [done] = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert done.name == "Weather" and done.parsed_arguments == Weather(city="Rome", days=2)
    assert final.choices[0].finish_reason == "tool_calls"
    turns: Any = asked["messages"] + [message.model_dump(exclude_none=True)]
    turns.append({"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"})
    turns += user({"text": "Sunny."})
    answer = client.chat.completions.create(model=MODEL, messages=turns, tools=tools)
    assert answer.choices[0].message.content == "Sunny."


async def test_a_worker_s_failure_reaches_a_stream(asynchronous: openai.AsyncOpenAI) -> None:
    text = ""
    with pytest.raises(openai.APIError) as caught:
        async for chunk in await asynchronous.chat.completions.create(
            model=MODEL, messages=user({"text": "abcdefgh", "fail_at": 5}), stream=True
        ):
            text += chunk.choices[0].delta.content or ""
    assert "abcdefgh".startswith(text) and len(text) <= 5
    assert caught.value.type == "server_error" and caught.value.code
