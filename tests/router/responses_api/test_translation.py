"""Requests to the Responses API in the words of chat completions."""

from typing import Any

import pytest

from headrace_router.parsing import parse_fields
from headrace_router.responses_api.items import items_of
from headrace_router.responses_api.response_object import About
from headrace_router.responses_api.schemas import ResponsesBody
from headrace_router.responses_api.translation import INCLUDABLE, LOGPROBS, translate
from headrace_router.schemas import ChatBody
from headrace_shared.errors import InvalidRequest

FUNCTION: dict[str, Any] = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}}
OTHER: dict[str, Any] = {"type": "function", "name": "g"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def both(**fields: Any) -> tuple[ChatBody, About]:
    body = parse_fields(ResponsesBody, {"model": "m", "input": "Hi", **fields})
    return translate(body, items_of(body.input, "resp_1", []))


def chat(**fields: Any) -> dict[str, Any]:
    return both(**fields)[0].model_dump(exclude_none=True)


def test_little_is_asked_for() -> None:
    told = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "stream": False, "background": False}
    assert chat() == told
    assert both()[1] == About()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_output_tokens": 5}, {"max_completion_tokens": 5}),
        ({"temperature": 0.5, "top_p": 0.9}, {"temperature": 0.5, "top_p": 0.9}),
        ({"stream": True}, {"stream": True}),
        ({"stream": True, "background": True}, {"stream": False, "background": True}),
        ({"include": [LOGPROBS]}, {"logprobs": True, "top_logprobs": 0}),
        ({"top_logprobs": 3}, {"logprobs": True, "top_logprobs": 3}),
        ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
        ({"user": "u", "metadata": {"a": "b"}}, {"user": "u", "metadata": {"a": "b"}}),
        ({"seed": 7, "stop": ["x"], "top_k": 3}, {"seed": 7, "stop": ["x"], "top_k": 3}),
        ({"presence_penalty": 0.5, "cache_salt": "s"}, {"presence_penalty": 0.5, "cache_salt": "s"}),
        ({"prompt_cache_key": "k", "service_tier": "auto"}, {"prompt_cache_key": "k", "service_tier": "auto"}),
        ({"reasoning": {"effort": "low"}}, {"reasoning_effort": "low"}),
        ({"tools": [], "tool_choice": "none"}, {}),
    ],
)
def test_parameters(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    told = chat(**fields)
    assert {name: told[name] for name in expected} == expected


def test_the_schema_of_a_structured_answer() -> None:
    form = {"type": "json_schema", "name": "out", "schema": SCHEMA, "strict": True}
    body, about = both(text={"format": form})
    assert body.response_format is not None and body.response_format.json_schema is not None
    assert (body.response_format.json_schema.name, body.response_format.json_schema.schema_) == ("out", SCHEMA)
    assert about.text == {"format": form, "verbosity": "medium"}


def test_tools_and_which_must_be_called() -> None:
    told = chat(tools=[FUNCTION, OTHER], parallel_tool_calls=False)
    assert told["parallel_tool_calls"] is False and "tool_choice" not in told
    assert [tool["function"]["name"] for tool in told["tools"]] == ["f", "g"]
    named = chat(tools=[FUNCTION], tool_choice={"type": "function", "name": "f"})
    assert named["tool_choice"] == {"type": "function", "function": {"name": "f"}}
    assert chat(tools=[FUNCTION], tool_choice="required")["tool_choice"] == "required"


def test_only_the_allowed_tools_are_there() -> None:
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "g"}]}
    told = chat(tools=[FUNCTION, OTHER], tool_choice=choice)
    assert told["tool_choice"] == "required"
    assert [tool["function"]["name"] for tool in told["tools"]] == ["g"]


def test_what_the_response_repeats() -> None:
    fields: dict[str, Any] = {
        "instructions": "Be kind.",
        "max_output_tokens": 9,
        "metadata": {"a": "b"},
        "parallel_tool_calls": False,
        "previous_response_id": "resp_0",
        "reasoning": {"effort": "low", "summary": "auto"},
        "tools": [FUNCTION],
        "tool_choice": "required",
        "truncation": "auto",
        "user": "u",
        "store": False,
    }
    _, about = both(**fields)
    assert about.tools == [{**FUNCTION, "strict": None}]
    for name in set(fields) - {"tools"}:
        assert getattr(about, name) == fields[name], name


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"background": True, "store": False}, "background"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options"),
        ({"include": ["nothing"]}, "include[0]"),
        ({"max_tool_calls": 0}, "max_tool_calls"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"metadata": {"k" * 65: ""}}, "metadata"),
        ({"metadata": {"k": "v" * 513}}, "metadata"),
        ({"metadata": {"k": 1}}, "metadata.k"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        (
            {"tools": [FUNCTION], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "x"}]}},
            "tool_choice.tools",
        ),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
        ({"truncation": "some"}, "truncation"),
        ({"seed": "x"}, "seed"),
        ({"n": 2}, "n"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        both(**fields)
    assert caught.value.param == param


def test_what_can_be_included_is_taken() -> None:
    both(include=sorted(INCLUDABLE))


def test_fields_of_chats_do_not_go_through() -> None:
    told = chat(messages=[{"role": "user", "content": "Other"}], max_tokens=3, logprobs=True)
    assert told["messages"] == [{"role": "user", "content": "Hi"}]
    assert "max_tokens" not in told and "logprobs" not in told
