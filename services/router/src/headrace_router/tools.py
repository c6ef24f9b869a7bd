"""The functions that a model may call, as OpenAI's API describes them. Pure."""

import json
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

from msgspec import Struct

from headrace_router.schemas import ChatBody, Tool
from headrace_router.structured_output import NAME, OutputForm, check_size
from headrace_shared.errors import InvalidRequest

MAX_TOOLS = 128
_DEFINITIONS = ("$defs", "definitions")


MISTRAL_MARK = "[TOOL_CALLS]"
"""A special token, in front of calls; shown only where special tokens are."""


class CallFormat(StrEnum):
    """How a model writes its calls."""

    TAGGED = "tagged"
    """<tool_call>{"name": …, "arguments": {…}}</tool_call>, with other text around it: Hermes, Qwen."""
    BARE = "bare"
    """The whole text is a call, calls between semicolons, or a JSON list of them: Llama 3, Mistral; and calls that a
    grammar enforces."""
    NAMED = "named"
    """[TOOL_CALLS]name[ARGS]{…}, behind other text, with an id between name and arguments or without: Mistral's newer
    models."""
    ARGUMENTS = "arguments"
    """The whole text is the arguments of the one function that must be called."""


class ToolUse(Struct, frozen=True, kw_only=True):
    """How calls are found in an answer."""

    format: CallFormat
    names: tuple[str, ...]
    """Of the functions; an object with another name is text."""
    is_parallel: bool
    """False: all calls after the first are left out."""


class Tools(NamedTuple):
    described: list[dict[str, Any]]
    """As chat templates take them; empty: the model is not to know of any."""
    use: ToolUse | None
    """None: it is not to call any."""
    form: OutputForm | None
    """Enforces a call."""


NO_TOOLS = Tools([], None, None)


def tools_of(body: ChatBody, template: str) -> Tools:
    """`template`: the model's, which shows how it writes calls. Raises InvalidRequest."""
    choice = body.tool_choice
    if body.tools is None:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest("'tool_choice' needs 'tools'.", param="tool_choice")
        return NO_TOOLS
    functions = _functions(body.tools)
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        choice, wanted = _allowed(choice.get("allowed_tools"))
        functions = {name: schema for name, schema in functions.items() if name in wanted}
        if not functions:
            param = "tool_choice.allowed_tools.tools"
            raise InvalidRequest(f"'{param}' allows none of 'tools'.", param=param)
    if choice == "none":
        return NO_TOOLS
    known = [tool for tool in described(body.tools) if tool["function"]["name"] in functions]
    is_parallel = body.parallel_tool_calls is not False
    names = tuple(functions)
    if choice in (None, "auto"):
        return Tools(known, ToolUse(format=call_format(template), names=names, is_parallel=is_parallel), None)
    if choice == "required":
        form = OutputForm("json", json.dumps(_calls_schema(functions, is_parallel)), "tools")
        check_size(form)
        return Tools(known, ToolUse(format=CallFormat.BARE, names=names, is_parallel=is_parallel), form)
    name = _named(choice)
    if name not in functions:
        raise InvalidRequest(
            f"'tool_choice' names '{name[:64]}', which is none of 'tools'.", param="tool_choice.function.name"
        )
    form = OutputForm("json", json.dumps(functions[name]), "tools")
    check_size(form)
    return Tools(known, ToolUse(format=CallFormat.ARGUMENTS, names=(name,), is_parallel=False), form)


def described(tools: Sequence[Tool] | None) -> list[dict[str, Any]]:
    """As chat templates take them. Raises InvalidRequest."""
    if tools is None:
        return []
    _functions(tools)
    return [tool.model_dump(exclude_none=True) for tool in tools]


def call_format(template: str) -> CallFormat:
    """What a model with this chat template was trained to write."""
    if "<tool_call>" in template or "tools" not in template:
        return CallFormat.TAGGED  # a template without tools gets ours
    return CallFormat.NAMED if "[ARGS]" in template else CallFormat.BARE


def _functions(tools: Sequence[Tool]) -> dict[str, dict[str, Any]]:
    """Schema of the arguments by name."""
    if not 1 <= len(tools) <= MAX_TOOLS:
        code = "invalid_value" if tools else "empty_array"
        raise InvalidRequest(f"'tools' must have 1 to {MAX_TOOLS} functions.", param="tools", code=code)
    functions: dict[str, dict[str, Any]] = {}
    for i, tool in enumerate(tools):
        where = f"tools[{i}]"
        if tool.type != "function":
            raise InvalidRequest(f"'{where}.type' must be 'function'.", param=f"{where}.type")
        name = tool.function.name
        if not NAME.fullmatch(name):
            raise InvalidRequest(
                f"'{where}.function.name' must have 1 to 64 characters out of a-z, A-Z, 0-9, _ and -.",
                param=f"{where}.function.name",
            )
        if name in functions:
            raise InvalidRequest(f"'{where}.function.name' is there twice.", param=f"{where}.function.name")
        functions[name] = _of_object(tool.function.parameters or {"properties": {}}, f"{where}.function.parameters")
    return functions


def _of_object(schema: dict[str, Any], param: str) -> dict[str, Any]:
    """Arguments are an object, whether or not their schema says so. Raises InvalidRequest."""
    given = schema.get("type")
    if given not in (None, "object") and not (isinstance(given, list) and "object" in given):
        raise InvalidRequest(f"'{param}.type' must be 'object'.", param=f"{param}.type", code="invalid_json_schema")
    return schema if given == "object" else {**schema, "type": "object"}


def _allowed(given: Any) -> tuple[str, set[str]]:
    """(as a choice among these functions, their names)"""
    fields = given if isinstance(given, Mapping) else {}
    mode, tools = fields.get("mode"), fields.get("tools")
    if mode not in ("auto", "required") or not isinstance(tools, list):
        param = "tool_choice.allowed_tools"
        raise InvalidRequest(f"'{param}' must have a 'mode', 'auto' or 'required', and 'tools'.", param=param)
    functions = [tool.get("function") for tool in tools if isinstance(tool, Mapping)]
    return mode, {str(function.get("name")) for function in functions if isinstance(function, Mapping)}


def _named(choice: Any) -> str:
    if isinstance(choice, Mapping) and choice.get("type") == "function" and isinstance(choice.get("function"), Mapping):
        name = choice["function"].get("name")
        if isinstance(name, str):
            return name
    raise InvalidRequest(
        "'tool_choice' must be 'none', 'auto', 'required', a named function or allowed tools.", param="tool_choice"
    )


def _calls_schema(functions: Mapping[str, dict[str, Any]], is_parallel: bool) -> dict[str, Any]:
    """A list of calls. Definitions move to the root, where references look for them; what is referred to in a schema
    itself is found there, too. Raises InvalidRequest."""
    definitions: dict[str, Any] = {}
    calls = []
    for number, (name, schema) in enumerate(functions.items()):
        own = {key: value for key, value in schema.items() if key not in _DEFINITIONS}
        for key in _DEFINITIONS:
            defined = schema.get(key) or {}
            if not isinstance(defined, Mapping):
                param = f"tools[{number}].function.parameters"
                raise InvalidRequest(f"'{param}.{key}' must be an object.", param=param, code="invalid_json_schema")
            for label, definition in defined.items():
                definitions[f"{number}.{label}"] = _relabelled(definition, number)
        arguments = _relabelled(own, number)
        if _refers_to_itself(schema):
            definitions[str(number)] = arguments
            arguments = {"$ref": f"#/$defs/{number}"}
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": name}, "arguments": arguments},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    schema = {"type": "array", "items": {"anyOf": calls}, "minItems": 1, "$defs": definitions}
    return schema if is_parallel else schema | {"maxItems": 1}


def _defined_by(reference: str) -> str | None:
    """The definition that it names; None: a part of the schema, or all of it."""
    starts = (f"#/{key}/" for key in _DEFINITIONS)
    return next((reference.removeprefix(start) for start in starts if reference.startswith(start)), None)


def _refers_to_itself(value: Any) -> bool:
    if isinstance(value, Mapping):
        reference = value.get("$ref")
        if isinstance(reference, str) and reference.startswith("#") and _defined_by(reference) is None:
            return True
        return any(map(_refers_to_itself, value.values()))
    return isinstance(value, list) and any(map(_refers_to_itself, value))


def _relabelled(value: Any, number: int) -> Any:
    if isinstance(value, Mapping):
        result = {key: _relabelled(item, number) for key, item in value.items()}
        reference = value.get("$ref")
        if isinstance(reference, str) and reference.startswith("#"):
            defined = _defined_by(reference)
            result["$ref"] = f"#/$defs/{number}{reference[1:]}" if defined is None else f"#/$defs/{number}.{defined}"
        return result
    if isinstance(value, list):
        return [_relabelled(item, number) for item in value]
    return value
