"""Tools of a chat: what they must be, who has to be called, and how a model without tools hears of them."""

import json
from typing import Any

import jsonschema
import pytest

from headrace_router.parsing import parse_body
from headrace_router.schemas import ChatBody
from headrace_router.tool_prompt import with_short_ids, with_tools
from headrace_router.tools import MAX_TOOLS, NO_TOOLS, CallFormat, Tools, call_format, tools_of
from headrace_shared.errors import InvalidRequest

POINT = {"type": "object", "properties": {"x": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"type": "integer"}}}


def tool(name: str = "f", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def asked(template: str = "{{ tools }} <tool_call>", **fields: Any) -> Tools:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi."}], **fields}
    return tools_of(parse_body(ChatBody, json.dumps(body).encode()), template)


def allowed(*names: str, mode: str = "auto") -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [tool(name) for name in names]}}


NAMED = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": []}, "tools"),
        ({"tools": [tool(f"f{n}") for n in range(MAX_TOOLS + 1)]}, "tools"),
        ({"tools": [tool("a b")]}, "tools[0].function.name"),
        ({"tools": [tool("f"), tool("f")]}, "tools[1].function.name"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "retrieval", "function": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [tool("f", parameters=[])]}, "tools[0].function.parameters"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": NAMED}, "tool_choice"),
        ({"tools": [tool("g")], "tool_choice": NAMED}, "tool_choice.function.name"),
        ({"tools": [tool()], "tool_choice": "maybe"}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
        ({"tools": [tool()], "tool_choice": allowed("f", mode="none")}, "tool_choice.allowed_tools"),
        ({"tools": [tool()], "tool_choice": allowed("g")}, "tool_choice.allowed_tools.tools"),
        ({"tool_choice": allowed("f")}, "tool_choice"),
    ],
)
def test_what_is_refused_names_the_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        asked(**fields)
    assert caught.value.param == param


def test_none_and_no_tools_are_no_tools() -> None:
    assert asked() == asked(tools=None, tool_choice="auto") == asked(tools=[tool()], tool_choice="none") == NO_TOOLS


def test_auto_leaves_the_model_free() -> None:
    free = asked(tools=[tool("f"), tool("g")], parallel_tool_calls=False)
    assert free.form is None and free.use is not None
    assert (free.use.format, free.use.names, free.use.is_parallel) == (CallFormat.TAGGED, ("f", "g"), False)
    assert [each["function"]["name"] for each in free.described] == ["f", "g"]


def test_only_allowed_tools_are_there() -> None:
    three = [tool("f"), tool("g"), tool("h")]
    some = asked(tools=three, tool_choice=allowed("h", "f", "unknown"))
    assert some == asked(tools=[three[0], three[2]])
    enforced = asked(tools=three, tool_choice=allowed("g", mode="required"))
    assert enforced == asked(tools=[three[1]], tool_choice="required")


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% if tools %}<tool_call>{% endif %}", CallFormat.TAGGED),
        ("{{ messages }}", CallFormat.TAGGED),
        ("{% if tools %}<|python_tag|>{% endif %}", CallFormat.BARE),
        ("{% if tools %}[AVAILABLE_TOOLS] [TOOL_CALLS]{% endif %}", CallFormat.BARE),
        ("{% if tools %}[AVAILABLE_TOOLS] [TOOL_CALLS][ARGS]{% endif %}", CallFormat.NAMED),
    ],
)
def test_the_template_tells_how_calls_are_written(template: str, expected: CallFormat) -> None:
    assert call_format(template) is expected


def test_a_named_function_s_arguments_are_the_answer() -> None:
    named = asked(tools=[tool("f", parameters=POINT)], tool_choice=NAMED)
    assert named.form is not None and json.loads(named.form.text) == POINT
    assert named.use is not None and named.use.format is CallFormat.ARGUMENTS


def test_required_calls_are_a_list_whose_references_still_lead_somewhere() -> None:
    other = {"type": "object", "properties": {"x": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"type": "string"}}}
    required = asked(tools=[tool("f", parameters=POINT), tool("g", parameters=other)], tool_choice="required")
    assert required.form is not None and required.use is not None and required.use.format is CallFormat.BARE
    schema = json.loads(required.form.text)
    for good in ([{"name": "f", "arguments": {"x": 1}}], [{"name": "g", "arguments": {"x": "1"}}] * 2):
        jsonschema.validate(good, schema)
    for bad in ([], [{"name": "f", "arguments": {"x": "1"}}], [{"name": "h", "arguments": {}}], [{"name": "f"}]):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(bad, schema)
    single = asked(tools=[tool("f")], tool_choice="required", parallel_tool_calls=False)
    assert single.form is not None and json.loads(single.form.text)["maxItems"] == 1


def test_a_schema_that_refers_to_itself_does_so_in_a_list_of_calls_too() -> None:
    node = {
        "type": "object",
        "properties": {
            "value": {"type": "integer"},
            "next": {"$ref": "#"},
            "same": {"$ref": "#/properties/value"},
            "named": {"$ref": "#/$defs/up"},
        },
        "required": ["value"],
        "additionalProperties": False,
        "$defs": {"up": {"type": "array", "items": {"$ref": "#"}}},
    }
    required = asked(tools=[tool("g", parameters=POINT), tool("f", parameters=node)], tool_choice="required")
    assert required.form is not None
    schema = json.loads(required.form.text)
    good = {"value": 1, "next": {"value": 2, "same": 3}, "named": [{"value": 4}]}
    jsonschema.validate([{"name": "f", "arguments": good}], schema)
    for bad in ({"value": 1, "next": [{"name": "f", "arguments": {"value": 1}}]}, {"value": 1, "same": "x"}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate([{"name": "f", "arguments": bad}], schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"x": {"type": "integer"}}, "required": ["x"]},
        {"type": ["object", "null"], "properties": {"x": {"type": "integer"}}, "required": ["x"]},
        {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/p"}], "$defs": {"p": {"type": "object", "required": ["x"]}}},
        {"type": None, "required": ["x"], "properties": {"x": {"type": "integer"}}},
    ],
)
def test_enforced_arguments_are_an_object_whether_or_not_their_schema_says_so(schema: dict[str, Any]) -> None:
    """Clients that read them as one had text, or a list, where the schema told properties alone."""
    named = asked(tools=[tool("f", parameters=schema)], tool_choice=NAMED)
    required = asked(tools=[tool("f", parameters=schema)], tool_choice="required")
    assert named.form is not None and required.form is not None
    arguments, calls = json.loads(named.form.text), json.loads(required.form.text)
    wrong: list[Any] = ["x", [], None, 1, {}]
    for value in wrong:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(value, arguments)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate([{"name": "f", "arguments": value}], calls)
    jsonschema.validate({"x": 1}, arguments)
    jsonschema.validate([{"name": "f", "arguments": {"x": 1}}], calls)


@pytest.mark.parametrize("kind", ["string", "array", ["string", "null"], [], 5])
@pytest.mark.parametrize("choice", ["auto", "none", "required", NAMED])
def test_arguments_that_are_no_object_are_refused(kind: Any, choice: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        asked(tools=[tool("g"), tool("f", parameters={"type": kind})], tool_choice=choice)
    assert (caught.value.param, caught.value.code) == ("tools[1].function.parameters.type", "invalid_json_schema")


@pytest.mark.parametrize("key", ["$defs", "definitions"])
@pytest.mark.parametrize("wrong", [[1, 2], "x", 5, True, [{"a": {}}]])
def test_definitions_that_are_none_are_named(key: str, wrong: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        asked(tools=[tool("g"), tool("f", parameters={"type": "object", key: wrong})], tool_choice="required")
    assert (caught.value.param, caught.value.code) == ("tools[1].function.parameters", "invalid_json_schema")


def test_ids_of_calls_are_as_short_as_a_template_wants_them_and_belong_together() -> None:
    calls = [{"id": given, "type": "function", "function": {"name": "f"}} for given in ("call_0123456789", "aB3456789")]
    chat: list[dict[str, Any]] = [
        {"role": "user", "content": "Go."},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "42", "tool_call_id": "call_0123456789"},
        {"role": "tool", "content": "43", "tool_call_id": "aB3456789"},
    ]
    told = with_short_ids(chat)
    first, second = (call["id"] for call in told[1]["tool_calls"])
    assert len(first) == 9 and first.isalnum() and second == "aB3456789"
    assert [message.get("tool_call_id") for message in told] == [None, None, first, second]
    assert told[0] == chat[0] and calls[0]["id"] == "call_0123456789"


def test_a_model_without_tools_is_told_of_them_in_words() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    chat: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Go."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "42", "tool_call_id": "1"},
    ]
    told = with_tools(chat, [tool("f")])
    assert [message["role"] for message in told] == ["system", "user", "assistant", "user"]
    assert told[0]["content"].startswith("Be brief.\n\n") and '"name": "f"' in told[0]["content"]
    assert told[2]["content"] == '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    assert told[3]["content"] == "<tool_response>\n42\n</tool_response>"
    assert with_tools([{"role": "user", "content": "Go."}], [tool("f")])[0]["role"] == "system"
    assert with_tools(chat[:2], []) == chat[:2]
