"""Function calls through OpenAI's client: chosen by a scripted model, and enforced on a real one."""

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any, Literal

import jsonschema
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from pydantic import BaseModel

from tests.e2e.api import MODEL
from tests.e2e.launcher import Launched, launched

pytestmark = [pytest.mark.e2e, pytest.mark.nats, pytest.mark.timeout(600)]

WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TIME = {"type": "object", "properties": {"zone": {"enum": ["CET", "UTC"]}}, "required": ["zone"]}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "description": "A forecast.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "time", "parameters": TIME}},
]
SCHEMAS: dict[str, dict[str, Any]] = {"weather": WEATHER, "time": TIME}
CALLS = (
    'Let me see.<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>\n'
    '<tool_call>\n{"name": "time", "arguments": {"zone": "UTC"}}\n</tool_call>'
)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    environment = {"HEADRACE_CONTEXT": "2048"}
    with launched(tmp_path_factory.mktemp("tools"), "--no-autoscaler", environment=environment) as system:
        yield system


@pytest.fixture
async def client(scripted: Launched) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=scripted.url + "/v1", api_key="none") as client:
        yield client


async def test_calls_of_the_model_s_own(client: AsyncOpenAI) -> None:
    messages: Any = [{"role": "user", "content": json.dumps({"text": CALLS})}]
    whole = await client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS, max_tokens=500)
    choice = whole.choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me see."
    calls: Any = choice.message.tool_calls
    told = [(call.type, call.function.name, json.loads(call.function.arguments)) for call in calls]
    assert told == [
        ("function", "weather", {"city": "Rome", "days": 2}),
        ("function", "time", {"zone": "UTC"}),
    ]
    assert len({call.id for call in calls}) == 2
    async with client.chat.completions.stream(model=MODEL, messages=messages, tools=TOOLS, max_tokens=500) as stream:
        async for _ in stream:
            pass
        final: Any = (await stream.get_final_completion()).choices[0]
    assert final.finish_reason == "tool_calls" and final.message.content == "Let me see."
    assert [(call.function.name, call.function.arguments) for call in final.message.tool_calls] == [
        (call.function.name, call.function.arguments) for call in calls
    ]


async def test_calls_and_results_go_back_to_the_model(client: AsyncOpenAI) -> None:
    """What the model reads of an earlier call; the script asks for what it was told."""
    messages: Any = [{"role": "user", "content": json.dumps({"text": CALLS})}]
    first: Any = await client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS, max_tokens=500)
    turn = first.choices[0].message
    messages += [turn.model_dump(exclude_none=True)]
    messages += [{"role": "tool", "tool_call_id": call.id, "content": "fine"} for call in turn.tool_calls]
    about: Any = [{"role": "user", "content": json.dumps({"text": "Sunny."})}]
    second = await client.chat.completions.create(model=MODEL, messages=messages + about, tools=TOOLS, max_tokens=500)
    assert second.choices[0].message.content == "Sunny." and second.choices[0].finish_reason == "stop"
    assert second.usage is not None and first.usage is not None
    assert second.usage.prompt_tokens > first.usage.prompt_tokens + 200


async def test_none_leaves_the_text_as_it_is(client: AsyncOpenAI) -> None:
    messages: Any = [{"role": "user", "content": json.dumps({"text": CALLS})}]
    answer = await client.chat.completions.create(
        model=MODEL, messages=messages, tools=TOOLS, tool_choice="none", max_tokens=500
    )
    assert answer.choices[0].message.content == CALLS and not answer.choices[0].message.tool_calls


@pytest.mark.model
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
async def test_calls_that_are_enforced(real: Launched, choice: Any, stream: bool) -> None:
    messages: Any = [{"role": "user", "content": "What is the weather in Rome?"}]
    asked: dict[str, Any] = {"model": MODEL, "messages": messages, "tools": TOOLS, "tool_choice": choice}
    asked |= {"parallel_tool_calls": False, "temperature": 0, "max_tokens": 120}
    async with AsyncOpenAI(base_url=real.url + "/v1", api_key="none") as openai:
        if stream:
            async with openai.chat.completions.stream(**asked) as events:
                async for _ in events:
                    pass
                answer: Any = (await events.get_final_completion()).choices[0]
        else:
            answer = (await openai.chat.completions.create(**asked)).choices[0]
    assert answer.finish_reason == ("tool_calls" if choice == "required" else "stop")
    (call,) = answer.message.tool_calls
    jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    assert not answer.message.content


class Forecast(BaseModel):
    city: Literal["Paris", "Rome"]
    days: int


@pytest.mark.model
async def test_the_same_in_the_words_of_other_apis(real: Launched) -> None:
    question = "What is the weather in Rome?"
    responses: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]
    messages: Any = [{"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()]
    asked: Any = {"model": MODEL, "input": question, "temperature": 0, "max_output_tokens": 120}
    async with AsyncOpenAI(base_url=real.url + "/v1", api_key="none") as openai:
        enforced = await openai.responses.create(
            tools=responses, tool_choice="required", parallel_tool_calls=False, **asked
        )
        (call,) = enforced.output
        assert call.type == "function_call"
        jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
        parsed = await openai.responses.parse(text_format=Forecast, **asked)
        assert parsed.output_parsed is not None
    async with AsyncAnthropic(base_url=real.url, api_key="none") as anthropic:
        told = await anthropic.messages.create(
            model=MODEL,
            messages=[{"role": "user", "content": question}],
            tools=messages,
            tool_choice={"type": "any", "disable_parallel_tool_use": True},
            extra_body={"temperature": 0},
            max_tokens=120,
        )
    (use,) = told.content
    assert use.type == "tool_use" and told.stop_reason == "tool_use"
    jsonschema.validate(use.input, SCHEMAS[use.name])
