"""A request to the Responses API to one for a chat completion. Pure.

Checks only what the translation would hide; the rest is checked where chats are, and the errors are renamed.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from headrace_router.field_names import FieldName
from headrace_router.parsing import parse_fields
from headrace_router.responses_api.conversation import chat_messages
from headrace_router.responses_api.items import Items
from headrace_router.responses_api.response_object import About
from headrace_router.responses_api.schemas import FunctionTool, InputTokensBody, ResponsesBody, TextConfig
from headrace_router.schemas import ChatBody
from headrace_shared.errors import InvalidRequest

LOGPROBS = "message.output_text.logprobs"
INCLUDABLE = {
    LOGPROBS,
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
}
"""Most of them are of tools that there are not, so that there is nothing to include."""
FIELD_NAMES = (
    FieldName("messages", "input"),
    FieldName("max_completion_tokens", "max_output_tokens"),
    FieldName("response_format.json_schema", "text.format"),
    FieldName("response_format", "text.format"),
    FieldName("reasoning_effort", "reasoning.effort"),
    FieldName("verbosity", "text.verbosity"),
    FieldName("tool_choice.function.name", "tool_choice.name"),
)
MAX_METADATA = 16
MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 512

_OURS = frozenset(
    {"messages", "n", "logprobs", "max_tokens", "max_completion_tokens", "response_format", "stream", "stream_options"}
    | {"continue_final_message", "add_generation_prompt", "functions", "function_call", "reasoning_effort"}
)
"""Fields of chats that the translation sets, or that make no sense here."""
_REFUSED = ("conversation", "prompt", "context_management", "moderation", "echo", "prompt_logprobs", "return_token_ids")
"""Some are of other servers' chats, and would have to show in the answer."""
_CALLS_NOTHING = ("none", "auto")


class Translated(NamedTuple):
    body: ChatBody
    about: About


def translate(body: ResponsesBody, items: Items) -> Translated:
    """`items`: the whole conversation. Raises InvalidRequest naming the field."""
    _check(body)
    is_background = bool(body.background)
    wants_logprobs = LOGPROBS in (body.include or ()) or bool(body.top_logprobs)
    fields = {
        **_extra(body.model_extra or {}),
        **_prompt_fields(body, items),
        "max_completion_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "logprobs": wants_logprobs or None,
        "top_logprobs": (body.top_logprobs or 0) if wants_logprobs else None,
        "stream": bool(body.stream) and not is_background,
        "background": is_background,
        "user": body.user,
        "metadata": body.metadata,
        "service_tier": body.service_tier,
        "prompt_cache_key": body.prompt_cache_key,
        "safety_identifier": body.safety_identifier,
    }
    chat = parse_fields(ChatBody, {name: value for name, value in fields.items() if value is not None})
    return Translated(chat, _about(body))


def translate_prompt(body: InputTokensBody, items: Items) -> ChatBody:
    """Only what the prompt depends on."""
    _refuse(body.model_extra or {})
    fields = {**_prompt_fields(body, items), "response_format": None}
    return parse_fields(ChatBody, {name: value for name, value in fields.items() if value is not None})


def _prompt_fields(body: InputTokensBody, items: Items) -> dict[str, Any]:
    tools, choice = _tools(body.tools or [], body.tool_choice)
    text, reasoning = body.text or TextConfig(), body.reasoning
    return {
        "model": body.model,
        "messages": chat_messages(body.instructions, items),
        "tools": tools or None,
        "tool_choice": choice if tools or choice not in _CALLS_NOTHING else None,
        "parallel_tool_calls": body.parallel_tool_calls if tools else None,
        "response_format": _response_format(text),
        "verbosity": text.verbosity,
        "reasoning_effort": None if reasoning is None else reasoning.effort,
    }


def _check(body: ResponsesBody) -> None:
    _refuse(body.model_extra or {})
    if body.background and body.store is False:
        raise InvalidRequest("'background' needs 'store' to be true.", param="background")
    for number, name in enumerate(body.include or ()):
        if name not in INCLUDABLE:
            raise InvalidRequest(f"'{name[:64]}' cannot be included.", param=f"include[{number}]")
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("'stream_options' needs 'stream' to be true.", param="stream_options")
    if body.max_tool_calls is not None and body.max_tool_calls < 1:
        raise InvalidRequest("'max_tool_calls' must be at least 1.", param="max_tool_calls")
    metadata = body.metadata or {}
    if len(metadata) > MAX_METADATA:
        raise InvalidRequest(f"'metadata' may have at most {MAX_METADATA} keys.", param="metadata")
    for key, value in metadata.items():
        if len(key) > MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE:
            raise InvalidRequest(
                f"Keys of 'metadata' may have at most {MAX_METADATA_KEY} characters, values {MAX_METADATA_VALUE}.",
                param="metadata",
            )


def _refuse(extra: Mapping[str, Any]) -> None:
    for name in _REFUSED:
        if extra.get(name) is not None:
            raise InvalidRequest(f"'{name}' is not supported.", param=name, code="unsupported_parameter")
    if extra.get("n") not in (None, 1):
        raise InvalidRequest("There is one answer.", param="n", code="unsupported_parameter")


def _extra(given: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of other open servers go through."""
    return {name: value for name, value in given.items() if name not in _OURS and name not in _REFUSED}


def _tools(tools: Sequence[FunctionTool], choice: str | Mapping[str, Any] | None) -> tuple[list[dict[str, Any]], Any]:
    """(as a chat has them, what must be called)"""
    described: list[dict[str, Any]] = []
    for number, tool in enumerate(tools):
        where = f"tools[{number}]"
        if tool.type != "function":
            raise InvalidRequest(f"Tools of the type '{tool.type[:32]}' are not supported.", param=f"{where}.type")
        if tool.name is None:
            raise InvalidRequest(
                f"'{where}.name' is required.", param=f"{where}.name", code="missing_required_parameter"
            )
        function = {
            "name": tool.name,
            "description": tool.description,
            "parameters": tool.parameters,
            "strict": tool.strict,
        }
        told = {name: value for name, value in function.items() if value is not None}
        described.append({"type": "function", "function": told})
    if choice is None or isinstance(choice, str):
        return described, choice
    kind = choice.get("type")
    if kind == "function" and isinstance(choice.get("name"), str):
        return described, {"type": "function", "function": {"name": choice["name"]}}
    if kind == "allowed_tools" and choice.get("mode") in ("auto", "required") and isinstance(choice.get("tools"), list):
        allowed = {tool.get("name") for tool in choice["tools"] if isinstance(tool, Mapping)}
        kept = [tool for tool in described if tool["function"]["name"] in allowed]
        if not kept:
            raise InvalidRequest("'tool_choice.tools' allows none of 'tools'.", param="tool_choice.tools")
        return kept, choice["mode"]
    raise InvalidRequest(
        "'tool_choice' must be 'none', 'auto', 'required', a named function or allowed tools.", param="tool_choice"
    )


def _response_format(text: TextConfig) -> dict[str, Any] | None:
    given = text.format
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return {"type": "json_object"}
    if given.type != "json_schema":
        raise InvalidRequest(
            "'text.format.type' must be 'text', 'json_object' or 'json_schema'.", param="text.format.type"
        )
    for field, value in (("name", given.name), ("schema", given.schema_)):
        if value is None:
            param = f"text.format.{field}"
            raise InvalidRequest(f"'{param}' is required.", param=param, code="missing_required_parameter")
    return {"type": "json_schema", "json_schema": {"name": given.name, "schema": given.schema_, "strict": given.strict}}


def _about(body: ResponsesBody) -> About:
    defaults = About()
    text = body.text or TextConfig()
    form = text.format.model_dump(by_alias=True, exclude_none=True) if text.format is not None else {"type": "text"}
    reasoning = body.reasoning
    return About(
        background=bool(body.background),
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        metadata=body.metadata or {},
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
        reasoning=defaults.reasoning
        if reasoning is None
        else {"effort": reasoning.effort, "summary": reasoning.summary},
        safety_identifier=body.safety_identifier,
        service_tier=body.service_tier if body.service_tier not in (None, "auto") else defaults.service_tier,
        store=body.store is not False,
        text={"format": form, "verbosity": text.verbosity or "medium"},
        tool_choice=body.tool_choice if body.tool_choice is not None else "auto",
        tools=[_tool_as_told(tool) for tool in body.tools or ()],
        top_logprobs=body.top_logprobs or 0,
        truncation=body.truncation or "disabled",
        user=body.user,
    )


def _tool_as_told(tool: FunctionTool) -> dict[str, Any]:
    return {
        "type": tool.type,
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.strict,
    }
