"""Requests to the Messages API in the words of chat completions."""

from typing import Any

import pytest

from headrace_router.messages_api.schemas import MessagesBody
from headrace_router.messages_api.translation import translate
from headrace_router.parsing import parse_fields
from headrace_shared.errors import InvalidRequest

TOOL: dict[str, Any] = {"name": "f", "description": "d", "input_schema": {"type": "object"}}
USE = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": "é"}}
HI = {"role": "user", "content": "Hi"}


def chat(messages: Any = (HI,), **fields: Any) -> dict[str, Any]:
    given = {"model": "m", "max_tokens": 9, "messages": list(messages), **fields}
    return translate(parse_fields(MessagesBody, given)).model_dump(exclude_none=True)


def messages(*given: dict[str, Any], **fields: Any) -> Any:
    return chat(given, **fields)["messages"]


def result(content: Any = "3", **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "toolu_1", "content": content, **fields}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value, "cache_control": {"type": "ephemeral"}}


def test_little_is_asked_for() -> None:
    assert chat() == {"model": "m", "messages": [HI], "max_completion_tokens": 9, "stream": False}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"stop_sequences": ["a", "b"]}, {"stop": ["a", "b"]}),
        ({"temperature": 0.5, "top_p": 0.9, "top_k": 3}, {"temperature": 0.5, "top_p": 0.9, "top_k": 3}),
        ({"stream": True}, {"stream": True}),
        ({"metadata": {"user_id": "u"}}, {"user": "u"}),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}, "service_tier": "auto"}, {}),
        ({"tools": [TOOL], "tool_choice": {"type": "auto"}}, {"tool_choice": "auto"}),
        ({"tools": [TOOL], "tool_choice": {"type": "any"}}, {"tool_choice": "required"}),
        ({"tools": [TOOL], "tool_choice": {"type": "none"}}, {"tool_choice": "none"}),
        (
            {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "f"}},
            {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        ),
        (
            {"tools": [TOOL], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
            {"parallel_tool_calls": False},
        ),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "output", "schema_": {"type": "object"}},
                }
            },
        ),
    ],
)
def test_parameters(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    told = chat(**fields)
    assert {name: told[name] for name in expected} == expected


def test_tools() -> None:
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}}
    assert chat(tools=[{**TOOL, "type": "custom"}])["tools"] == [{"type": "function", "function": function}]
    assert "tools" not in chat(tools=[])


def test_the_system_prompt() -> None:
    for system in ("Be kind.", [text("Be "), text("kind.")]):
        assert messages(HI, system=system)[0] == {"role": "system", "content": "Be kind."}
    assert messages(HI, system="") == [HI]


def test_blocks_are_joined_and_turns_of_one_role_become_one() -> None:
    two = {"role": "user", "content": [text("a"), text("b")]}
    assert messages(two) == [{"role": "user", "content": "ab"}]
    assert messages(HI, two) == [{"role": "user", "content": "Hi\n\nab"}]
    document = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "page"}}
    assert messages({"role": "user", "content": [document, text("?")]})[0]["content"] == "page?"


def test_calls_and_their_results() -> None:
    thinking = {"type": "thinking", "thinking": "Hm.", "signature": "s"}
    hidden = {"type": "redacted_thinking", "data": "x"}
    told = messages(
        HI,
        {"role": "assistant", "content": [thinking, hidden, text("See."), USE]},
        {"role": "user", "content": [text("and?"), result([text("3"), text("4")])]},
    )
    function = {"name": "f", "arguments": '{"a": "é"}'}
    assert told == [
        HI,
        {
            "role": "assistant",
            "content": "See.",
            "reasoning_content": "Hm.",
            "tool_calls": [{"id": "toolu_1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "toolu_1", "content": "34"},
        {"role": "user", "content": "and?"},
    ]
    failed = messages(HI, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [result(is_error=True)]})
    assert failed[-1] == {"role": "tool", "tool_call_id": "toolu_1", "content": "Error: 3"}
    assert (
        messages(HI, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [result(None)]})[-1][
            "content"
        ]
        == ""
    )


def test_an_answer_that_has_been_begun_goes_on() -> None:
    told = chat([HI, {"role": "assistant", "content": "The answer is ("}])
    assert told["continue_final_message"] is True
    assert "continue_final_message" not in chat()


@pytest.mark.parametrize("nothing", ["", [], [text("")]])
def test_an_answer_that_begins_with_nothing_is_a_new_one(nothing: Any) -> None:
    """Anthropic's API lets the last message be empty."""
    assert chat([HI, {"role": "assistant", "content": nothing}]) == chat([HI])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"role": "assistant", "content": ""}]}, "messages"),
        ({"messages": [HI, {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm."}]}]}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [USE]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [result()]}]}, "messages[0].content[0].tool_use_id"),
        ({"messages": [HI, {"role": "assistant", "content": [USE]}]}, "messages"),
        ({"messages": [HI, {"role": "assistant", "content": [{**USE, "id": None}]}]}, "messages[1].content[0].id"),
        ({"messages": [HI, {"role": "assistant", "content": [result()]}]}, "messages[1].content[0].type"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"tools": [{"name": "w", "type": "web_search_20250305"}]}, "tools[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.type"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        given = {"model": "m", "max_tokens": 9, "messages": [HI], **fields}
        translate(parse_fields(MessagesBody, given))
    assert caught.value.param == param
