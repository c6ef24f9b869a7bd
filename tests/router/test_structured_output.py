"""Which form of an answer a body asks for, and what asks for too much or too little."""

import json
from typing import Any

import pytest

from headrace_router.parsing import parse_body
from headrace_router.schemas import ChatBody
from headrace_router.structured_output import MAX_CHOICES, OutputForm, output_form
from headrace_shared.errors import InvalidRequest
from headrace_shared.grammars import MAX_GRAMMAR_BYTES

SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}}


def asked(**fields: Any) -> OutputForm | None:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi."}], **fields}
    return output_form(parse_body(ChatBody, json.dumps(body).encode()))


def named(schema: Any = SCHEMA, **fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "person", "schema": schema, **fields}}


@pytest.mark.parametrize(
    ("fields", "kind", "text", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "json", '{"type":"object"}', "response_format"),
        ({"response_format": {"type": "json_object", "schema": None}}, "json", '{"type":"object"}', "response_format"),
        (
            {"response_format": {"type": "json_object", "schema": SCHEMA}},
            "json",
            json.dumps(SCHEMA),
            "response_format.schema",
        ),
        ({"response_format": named(strict=True)}, "json", json.dumps(SCHEMA), "response_format.json_schema.schema"),
        ({"response_format": named(None)}, "json", "{}", "response_format.json_schema.schema"),
        ({"structured_outputs": {"json": SCHEMA}}, "json", json.dumps(SCHEMA), "structured_outputs.json"),
        ({"structured_outputs": {"json": '{"a":1}'}}, "json", '{"a":1}', "structured_outputs.json"),
        ({"structured_outputs": {"json_object": True}}, "json", '{"type":"object"}', "structured_outputs.json_object"),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+", "structured_outputs.regex"),
        ({"structured_outputs": {"choice": ["é", "b"]}}, "choice", '["é","b"]', "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": "start: A"}}, "grammar", "start: A", "structured_outputs.grammar"),
        ({"regex": "a"}, "regex", "a", "regex"),
        ({"ebnf": "root ::= A"}, "grammar", "root ::= A", "ebnf"),
    ],
)
def test_the_form_that_is_asked_for(fields: dict[str, Any], kind: str, text: str, param: str) -> None:
    form = asked(**fields)
    assert form is not None and (form.kind, form.param) == (kind, param)
    if kind == "json":
        assert json.loads(form.text) == json.loads(text)
    else:
        assert form.text == text


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, {"response_format": None}])
def test_no_form(fields: dict[str, Any]) -> None:
    assert asked(**fields) is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": "json_object"}, "response_format"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.name"),
        ({"response_format": named(name="ä")}, "response_format.json_schema.name"),
        ({"response_format": named(name="a" * 65)}, "response_format.json_schema.name"),
        ({"response_format": named([])}, "response_format.json_schema.schema"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": [""]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a"] * (MAX_CHOICES + 1)}}, "structured_outputs.choice"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ({"response_format": {"type": "json_object"}, "regex": "a"}, "regex"),
        ({"regex": "a" * (MAX_GRAMMAR_BYTES + 1)}, "regex"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"regex": "a", "min_tokens": 3}, "min_tokens"),
    ],
)
def test_what_is_refused_names_the_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        asked(**fields)
    assert caught.value.param == param
