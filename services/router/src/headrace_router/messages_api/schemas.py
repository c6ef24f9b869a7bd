"""What clients of Anthropic's Messages API send. Types only.

https://docs.anthropic.com/en/api/messages
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from headrace_router.schemas import ListOf


class _Schema(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, protected_namespaces=())


class ContentBlock(_Schema):
    """Of any type; which fields it needs is `conversation.py`'s business. Marks for the cache change nothing: what can
    be cached is."""

    type: str
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: "str | ListOf[ContentBlock] | None" = None
    is_error: bool | None = None
    thinking: str | None = None
    source: dict[str, Any] | None = None


class Turn(_Schema):
    role: Literal["user", "assistant", "system"]
    content: str | ListOf[ContentBlock]


class MessageTool(_Schema):
    type: str | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class ToolChoice(_Schema):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputConfig(_Schema):
    effort: str | None = None
    """No model here knows of it."""
    format: dict[str, Any] | None = None


class Metadata(_Schema):
    user_id: str | None = None


class CountTokensBody(_Schema):
    """What a prompt is made of."""

    model: str
    messages: ListOf[Turn]
    system: str | ListOf[ContentBlock] | None = None
    tools: ListOf[MessageTool] | None = None
    tool_choice: ToolChoice | None = None
    output_config: OutputConfig | None = None
    thinking: dict[str, Any] | None = None
    """Taken and not heeded: models think as their templates say."""


class MessagesBody(CountTokensBody):
    max_tokens: int
    metadata: Metadata | None = None
    service_tier: str | None = None
    """There is one."""
    stop_sequences: ListOf[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
