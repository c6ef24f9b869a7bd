"""The Messages API with Anthropic's own client, against running processes."""

import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest
from anthropic import AsyncAnthropic
from anthropic.types import MessageParam, ToolParam

from tests.e2e.api import MODEL
from tests.e2e.launcher import Launched

pytestmark = [pytest.mark.e2e, pytest.mark.nats]

TEXT = "안녕하세요 🦉, the tin is open."
CALL = 'Let me see.<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
WEATHER: ToolParam = {
    "name": "weather",
    "description": "A forecast.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}


def says(text: str, **more: Any) -> list[MessageParam]:
    return [{"role": "user", "content": json.dumps({"text": text, **more})}]


@pytest.fixture
async def client(scripted: Launched) -> AsyncIterator[AsyncAnthropic]:
    async with AsyncAnthropic(base_url=scripted.url, api_key="none", max_retries=0) as client:
        yield client


async def test_a_message_whole_and_streamed(client: AsyncAnthropic) -> None:
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 200, "messages": says(TEXT), "system": "Be brief."}
    whole = await client.messages.create(**asked)
    assert [block.text for block in whole.content if block.type == "text"] == [TEXT]
    assert whole.stop_reason == "end_turn" and whole._request_id is not None
    async with client.messages.stream(**asked) as stream:
        texts = [text async for text in stream.text_stream]
        final = await stream.get_final_message()
    assert "".join(texts) == TEXT and len(texts) > 3
    assert final.content[0].type == "text" and final.content[0].text == TEXT
    assert final.stop_reason == "end_turn" and final.usage.output_tokens == whole.usage.output_tokens
    total = whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
    assert final.usage.input_tokens + (final.usage.cache_read_input_tokens or 0) == total
    del asked["max_tokens"]
    assert (await client.messages.count_tokens(**asked)).input_tokens == total


async def test_stop_sequences(client: AsyncAnthropic) -> None:
    told = await client.messages.create(
        model=MODEL, max_tokens=200, messages=says("one two three"), stop_sequences=["two"]
    )
    assert told.content[0].type == "text" and told.content[0].text == "one "
    assert (told.stop_reason, told.stop_sequence) == ("stop_sequence", "two")


async def test_calls_and_their_results(client: AsyncAnthropic) -> None:
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 300, "tools": [WEATHER]}
    whole = await client.messages.create(messages=says(CALL), **asked)
    said, use = whole.content
    assert said.type == "text" and said.text == "Let me see." and whole.stop_reason == "tool_use"
    assert use.type == "tool_use" and (use.name, use.input) == ("weather", {"city": "Rome"})
    async with client.messages.stream(messages=says(CALL), **asked) as stream:
        final: Any = await stream.get_final_message()
    assert [block.type for block in final.content] == ["text", "tool_use"] and final.content[1].input == use.input
    turns: Any = [
        *says(CALL),
        whole.to_param(),
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": use.id, "content": "sunny"},
                {"type": "text", "text": json.dumps({"text": "It is sunny."})},
            ],
        },
    ]
    after = await client.messages.create(messages=turns, **asked)
    assert after.content[0].type == "text" and after.content[0].text == "It is sunny."


async def test_errors(client: AsyncAnthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        await client.messages.create(model="nothing", max_tokens=5, messages=says("a"))
    assert missing.value.type == "not_found_error"
    with pytest.raises(anthropic.BadRequestError) as bad:
        await client.messages.create(model=MODEL, max_tokens=5, messages=says("a"), extra_body={"temperature": 3})
    assert bad.value.type == "invalid_request_error" and "temperature" in bad.value.message
    with pytest.raises(anthropic.APIStatusError):
        async with client.messages.stream(model=MODEL, max_tokens=9, messages=says("abcdef", fail_at=3)) as stream:
            async for _ in stream:
                pass
