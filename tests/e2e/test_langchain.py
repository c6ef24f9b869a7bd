"""LangChain's ChatOpenAI against a running system with scripted answers."""

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, SecretStr

from tests.e2e.api import MODEL
from tests.e2e.launcher import Launched

pytestmark = [pytest.mark.e2e, pytest.mark.nats]

SAID = "Grüße, 世界 🦉"
NUM_SAID = len(SAID.encode()) + 1


class Weather(BaseModel):
    """A forecast."""

    city: str
    days: int


@tool
def forecast(city: str, days: int) -> str:
    """The weather in a city."""
    return f"{days} days of sun in {city}"


@pytest.fixture
async def model(scripted: Launched) -> AsyncIterator[ChatOpenAI]:
    # With connections of its own: by default they are kept for the next test, whose event loop is another.
    with openai.DefaultHttpxClient() as client:
        async with openai.DefaultAsyncHttpxClient() as asynchronous:
            yield ChatOpenAI(
                model=MODEL,
                base_url=f"{scripted.url}/v1",
                api_key=SecretStr("none"),
                max_retries=0,
                http_client=client,
                http_async_client=asynchronous,
            )


def says(text: str) -> str:
    return json.dumps({"text": text}, ensure_ascii=False)


def called(name: str, **arguments: Any) -> str:
    return says(f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>")


async def test_invoke(model: ChatOpenAI) -> None:
    answer = model.invoke([SystemMessage("Be kind."), HumanMessage(says(SAID))])
    assert answer.content == SAID
    assert answer.usage_metadata is not None and answer.usage_metadata["output_tokens"] == NUM_SAID
    assert answer.response_metadata["finish_reason"] == "stop"
    assert [each.content for each in model.batch([says("one"), says("two")])] == ["one", "two"]


async def test_streams(model: ChatOpenAI) -> None:
    streaming = model.model_copy(update={"stream_usage": True})
    chunks = list(streaming.stream(says(SAID)))
    assert "".join(str(chunk.content) for chunk in chunks) == SAID and len(chunks) > 5
    whole: Any = None
    async for chunk in streaming.astream(says(SAID)):
        whole = chunk if whole is None else whole + chunk
    assert whole.content == SAID and whole.usage_metadata["output_tokens"] == NUM_SAID
    assert (await model.ainvoke(says(SAID))).content == SAID


async def test_tools_are_called_and_told_what_came_of_it(model: ChatOpenAI) -> None:
    bound = model.bind_tools([forecast])
    question = HumanMessage(called("forecast", city="Rome", days=2))
    answer = bound.invoke([question])
    assert isinstance(answer, AIMessage)
    [call] = answer.tool_calls
    assert (call["name"], call["args"]) == ("forecast", {"city": "Rome", "days": 2})
    assert answer.response_metadata["finish_reason"] == "tool_calls"
    whole: Any = None
    async for chunk in bound.astream([question]):
        whole = chunk if whole is None else whole + chunk
    assert [(each["name"], each["args"]) for each in whole.tool_calls] == [(call["name"], call["args"])]
    result = forecast.invoke(call)
    assert isinstance(result, ToolMessage)
    final = bound.invoke([question, answer, result, HumanMessage(says("Sunny."))])
    assert final.content == "Sunny."


@pytest.mark.parametrize("method", ["json_schema", "json_mode", "function_calling"])
async def test_structured_output(model: ChatOpenAI, method: Any) -> None:
    """Whether the model keeps to the form is shown with a real one, in `test_structured_output.py`."""
    found = model.with_structured_output(Weather, method=method).invoke(says('{"city": "Rome", "days": 2}'))
    assert found == Weather(city="Rome", days=2)


async def test_refusals_are_openais_errors(model: ChatOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        model.invoke("Hi", temperature=9.0)
    assert caught.value.param == "temperature"
