"""The messages of a chat as templates take them. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from headrace_router.json_structure import Structure
from headrace_router.parsing import parse_arguments
from headrace_router.schemas import ChatMessage
from headrace_shared.errors import InvalidRequest


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Raises InvalidRequest naming the field of the message."""
    arguments = Structure()
    return [_template_message(message, f"messages[{i}]", arguments) for i, message in enumerate(messages)]


def _template_message(message: ChatMessage, where: str, arguments: Structure) -> dict[str, Any]:
    for field, value in (("audio", message.audio), ("function_call", message.function_call)):
        if value is not None:  # left out, the model would answer another conversation
            param = f"{where}.{field}"
            raise InvalidRequest(f"'{param}' is not supported.", param=param, code="unsupported_parameter")
    result: dict[str, Any] = {"role": message.role, "content": _content(message, where)}
    if message.name is not None:
        result["name"] = message.name
    if message.tool_call_id is not None:
        result["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        result["tool_calls"] = [
            _tool_call(call, f"{where}.tool_calls[{i}]", arguments) for i, call in enumerate(message.tool_calls)
        ]
    reasoning = message.reasoning if message.reasoning_content is None else message.reasoning_content
    if reasoning is not None:
        result["reasoning_content"] = reasoning
    return result


def _content(message: ChatMessage, where: str) -> str:
    """Text parts are simply joined, in every role. What the assistant has refused with is text, too."""
    content = message.content
    refusal = message.refusal or "" if message.role == "assistant" else ""
    if isinstance(content, str):
        return content + refusal
    if content is None:
        if message.role != "assistant":
            raise InvalidRequest(f"'{where}.content' is required.", param=f"{where}.content")
        return refusal
    texts = []
    for i, part in enumerate(content):
        is_refusal = part.type == "refusal" and message.role == "assistant"
        if part.type != "text" and not is_refusal:
            param = f"{where}.content[{i}].type"
            raise InvalidRequest(f"This model takes no content of type '{part.type[:32]}'.", param=param)
        text = part.refusal if is_refusal else part.text
        if text is None:
            param = f"{where}.content[{i}].{part.type}"
            raise InvalidRequest(f"'{param}' is required.", param=param, code="missing_required_parameter")
        texts.append(text)
    return "".join([*texts, refusal])


def _tool_call(call: Mapping[str, Any], where: str, structure: Structure) -> dict[str, Any]:
    """Templates take the arguments as an object, where they are one; OpenAI's API has them as JSON text."""
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"'{where}.function.name' is required.", param=f"{where}.function.name")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = parse_arguments(arguments, f"{where}.function.arguments", structure)
    return {**call, "function": {**function, "arguments": arguments}}
