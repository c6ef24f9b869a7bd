"""The Responses API with OpenAI's own client, against running processes: two routers, and an engine that answers as its
prompts say."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from openai.types.responses import FunctionToolParam, ResponseInputParam
from pydantic import BaseModel

from tests.e2e.api import MODEL
from tests.e2e.launcher import Launched

pytestmark = [pytest.mark.e2e, pytest.mark.nats]

CALL = 'Let me see.<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
WEATHER: FunctionToolParam = {
    "type": "function",
    "name": "weather",
    "description": "A forecast.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
PENDING = ("queued", "in_progress")
TEXT = "안녕하세요 🦉, the tin is open."


class Place(BaseModel):
    city: str
    days: int


def says(text: str, **more: Any) -> str:
    return json.dumps({"text": text, **more})


@pytest.fixture
async def one(scripted: Launched) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{scripted.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def other(scripted: Launched) -> AsyncIterator[AsyncOpenAI]:
    """At the second router."""
    url = f"http://127.0.0.1:{scripted.port + 1}/v1"
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


async def test_an_answer_whole_and_streamed(one: AsyncOpenAI, other: AsyncOpenAI) -> None:
    whole = await one.responses.create(model=MODEL, input=says(TEXT), instructions="Be brief.", max_output_tokens=99)
    assert whole.output_text == TEXT and whole.status == "completed" and whole.usage is not None
    async with other.responses.stream(model=MODEL, input=says(TEXT), instructions="Be brief.") as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()
    assert final.output_text == TEXT
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == TEXT
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert final.usage is not None and final.usage.output_tokens == whole.usage.output_tokens
    kept = await one.responses.retrieve(final.id)
    assert kept.output_text == TEXT and kept.id == final.id


async def test_a_conversation_is_kept_for_every_router(one: AsyncOpenAI, other: AsyncOpenAI) -> None:
    first = await one.responses.create(model=MODEL, input=says("My name is Ann."))
    second = await other.responses.create(model=MODEL, input=says("Ann."), previous_response_id=first.id)
    assert second.output_text == "Ann." and second.previous_response_id == first.id
    assert first.usage is not None and second.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens + 20
    items = [item async for item in one.responses.input_items.list(second.id, order="asc", limit=2)]
    assert len(items) == 3
    counted = await one.responses.input_tokens.count(model=MODEL, input=says("Ann."), previous_response_id=first.id)
    assert counted.input_tokens == second.usage.input_tokens
    await other.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        await one.responses.retrieve(first.id)
    again = await one.responses.create(model=MODEL, input=says("Ann!"), previous_response_id=second.id)
    assert again.output_text == "Ann!", "what was said is kept with what came after it"


async def test_an_answer_that_is_parsed(one: AsyncOpenAI) -> None:
    written = says(json.dumps({"city": "Rome", "days": 3}))
    parsed = await one.responses.parse(model=MODEL, input=written, text_format=Place)
    assert parsed.output_parsed == Place(city="Rome", days=3)
    async with one.responses.stream(model=MODEL, input=written, text_format=Place) as stream:
        async for _ in stream:
            pass
        assert (await stream.get_final_response()).output_parsed == Place(city="Rome", days=3)


async def test_calls_and_their_results(one: AsyncOpenAI, other: AsyncOpenAI) -> None:
    whole = await one.responses.create(model=MODEL, input=says(CALL), tools=[WEATHER])
    message, call = whole.output
    assert message.type == "message" and call.type == "function_call"
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Rome"})
    async with other.responses.stream(model=MODEL, input=says(CALL), tools=[WEATHER]) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_response()
    assert [item.type for item in final.output] == ["message", "function_call"]
    told: ResponseInputParam = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"},
        {"role": "user", "content": says("It is sunny.")},
    ]
    after = await other.responses.create(model=MODEL, input=told, previous_response_id=whole.id, tools=[WEATHER])
    assert after.output_text == "It is sunny."
    stateless: Any = [{"role": "user", "content": "?"}, *(item.to_dict() for item in whole.output), *told]
    again = await one.responses.create(model=MODEL, input=stateless, tools=[WEATHER], store=False)
    assert again.output_text == "It is sunny."


async def test_a_call_with_malformed_arguments_is_no_end_of_a_conversation(one: AsyncOpenAI) -> None:
    """Models write such; what they wrote comes back, from the store and from clients."""
    arguments = '{"city": Rome}'
    asked: dict[str, Any] = {"model": MODEL, "tools": [WEATHER]}
    first = await one.responses.create(
        input=says(f'<tool_call>{{"name": "weather", "arguments": {arguments}}}</tool_call>'), **asked
    )
    (call,) = [item for item in first.output if item.type == "function_call"]
    assert call.arguments == arguments
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "These were no JSON."}
    ask: Any = {"role": "user", "content": says("Sorry.")}
    kept = await one.responses.create(input=[result, ask], previous_response_id=first.id, **asked)
    told = await one.responses.create(input=[call.model_dump(exclude_none=True), result, ask], **asked)
    assert kept.output_text == told.output_text == "Sorry."


async def test_a_background_response(one: AsyncOpenAI, other: AsyncOpenAI) -> None:
    made = await one.responses.create(model=MODEL, input=says(TEXT * 4), background=True)
    assert made.status == "queued"
    async with asyncio.timeout(90.0):
        while (kept := await other.responses.retrieve(made.id)).status in PENDING:  # noqa: ASYNC110 - another process's
            await asyncio.sleep(0.05)
    assert kept.status == "completed" and kept.output_text == TEXT * 4
    stream = await one.responses.create(model=MODEL, input=says(TEXT * 4), background=True, stream=True)
    events: list[Any] = []
    async for event in stream:
        events.append(event)
        if event.type == "response.output_text.delta" and len(events) > 20:
            break
    await stream.close()
    number = events[-1].sequence_number
    rest = await other.responses.retrieve(events[0].response.id, stream=True, starting_after=number)
    events += [event async for event in rest]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == TEXT * 4
    assert events[-1].type == "response.completed"


async def test_a_background_response_is_cancelled(one: AsyncOpenAI, other: AsyncOpenAI) -> None:
    endless = json.dumps({"echo": "abc"})
    made = await one.responses.create(model=MODEL, input=endless, background=True, max_output_tokens=3000)
    cancelled = await other.responses.cancel(made.id)
    assert cancelled.status == "cancelled"
    assert (await one.responses.retrieve(made.id)).status == "cancelled"


async def test_errors(one: AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await one.responses.create(model=MODEL, input="Hi", temperature=3)
    assert caught.value.param == "temperature" and caught.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError):
        await one.responses.create(model="nothing", input="Hi")
    stream = await one.responses.create(model=MODEL, input=says("abcdef", fail_at=3), stream=True)
    events: list[Any] = [event async for event in stream]
    assert events[-1].type == "response.failed" and events[-1].response.error is not None
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "abc"
