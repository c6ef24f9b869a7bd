"""Answers of the Messages API, for the API's description."""

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType


class MessageUsage(Struct):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    cache_creation: None
    inference_geo: None
    output_tokens_details: None
    server_tool_use: None
    service_tier: Literal["standard"]


class MessageObject(Struct):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    """Blocks of text and tool_use."""
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
    stop_sequence: str | None
    stop_details: None
    container: None
    usage: MessageUsage


class TokenCount(Struct):
    input_tokens: int


class MessageProblem(Struct):
    type: str
    message: str


class MessageError(Struct):
    type: Literal["error"]
    error: MessageProblem
    request_id: str | UnsetType = UNSET
