"""A request to Anthropic's Messages API to one for a chat completion. Pure.

Checks only what the translation would hide; the rest is checked where chats are, and the errors are renamed.
"""

from collections.abc import Mapping
from typing import Any

from headrace_router.field_names import FieldName
from headrace_router.messages_api.conversation import chat_messages
from headrace_router.messages_api.schemas import CountTokensBody, MessagesBody, ToolChoice
from headrace_router.parsing import parse_fields
from headrace_router.schemas import ChatBody
from headrace_shared.errors import InvalidRequest

FIELD_NAMES = (
    FieldName("max_completion_tokens", "max_tokens"),
    FieldName("stop", "stop_sequences"),
    FieldName("user", "metadata.user_id"),
    FieldName("response_format.json_schema", "output_config.format"),
    FieldName("response_format", "output_config.format"),
    FieldName("tool_choice.function.name", "tool_choice.name"),
)
_REFUSED = ("mcp_servers", "container")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def translate(body: MessagesBody, *, limits_tokens: bool = True) -> ChatBody:
    """Without `limits_tokens` the answer may be as long as there is room. Raises InvalidRequest naming the field."""
    if body.max_tokens < 1:
        raise InvalidRequest("'max_tokens' must be at least 1.", param="max_tokens")
    for name in _REFUSED:
        if (body.model_extra or {}).get(name):
            raise InvalidRequest(f"'{name}' is not supported.", param=name, code="unsupported_parameter")
    fields = {
        **_prompt_fields(body),
        "max_completion_tokens": body.max_tokens if limits_tokens else None,
        "stop": body.stop_sequences or None,
        "stream": bool(body.stream),
        "temperature": body.temperature,
        "top_k": body.top_k,
        "top_p": body.top_p,
        "user": body.metadata.user_id if body.metadata is not None else None,
    }
    return _chat(fields)


def translate_prompt(body: CountTokensBody) -> ChatBody:
    """Only what the prompt depends on."""
    return _chat({**_prompt_fields(body), "response_format": None})


def _prompt_fields(body: CountTokensBody) -> dict[str, Any]:
    messages = chat_messages(body.system, body.messages)
    last = messages[-1]
    is_begun = last["role"] == "assistant"
    if is_begun and last.get("tool_calls"):
        raise InvalidRequest("'tool_use' blocks need their results in the next message.", param="messages")
    if is_begun and not last["content"]:
        if "reasoning_content" in last or len(messages) == 1:
            raise InvalidRequest("The last of 'messages' has no text.", param="messages")
        messages, is_begun = messages[:-1], False  # an answer that begins with nothing
    choice = body.tool_choice
    return {
        "model": body.model,
        "messages": messages,
        "continue_final_message": is_begun or None,
        "tools": _tools(body) or None,
        "tool_choice": _tool_choice(choice) if choice is not None else None,
        "parallel_tool_calls": False if choice is not None and choice.disable_parallel_tool_use else None,
        "response_format": _response_format(body.output_config.format if body.output_config is not None else None),
    }


def _tools(body: CountTokensBody) -> list[dict[str, Any]]:
    tools = []
    for number, tool in enumerate(body.tools or ()):
        where = f"tools[{number}]"
        if tool.type not in (None, "custom"):
            raise InvalidRequest(f"Tools of the type '{tool.type[:32]}' are not supported.", param=f"{where}.type")
        if tool.input_schema is None:
            param = f"{where}.input_schema"
            raise InvalidRequest(f"'{param}' is required.", param=param, code="missing_required_parameter")
        function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
        if tool.description is not None:
            function["description"] = tool.description
        tools.append({"type": "function", "function": function})
    return tools


def _tool_choice(choice: ToolChoice) -> Any:
    if choice.type == "tool" and choice.name is not None:
        return {"type": "function", "function": {"name": choice.name}}
    if choice.type not in _CHOICES:
        raise InvalidRequest(
            "'tool_choice.type' must be 'auto', 'any', 'none', or 'tool' with a name.", param="tool_choice.type"
        )
    return _CHOICES[choice.type]


def _response_format(given: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if given is None:
        return None
    if given.get("type") != "json_schema" or not isinstance(given.get("schema"), Mapping):
        raise InvalidRequest(
            "'output_config.format' must be of the type 'json_schema' and have a 'schema'.",
            param="output_config.format",
        )
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": given["schema"]}}


def _chat(fields: Mapping[str, Any]) -> ChatBody:
    return parse_fields(ChatBody, {name: value for name, value in fields.items() if value is not None})
