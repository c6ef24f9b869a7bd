"""What clients of the Responses API send. Types only.

https://platform.openai.com/docs/api-reference/responses and https://www.openresponses.org/specification
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from headrace_router.schemas import ListOf


class _Schema(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, protected_namespaces=())


class Part(_Schema):
    """Of a message, or of what a function returned."""

    type: str
    text: str | None = None
    refusal: str | None = None


class Item(_Schema):
    """Of any type; which fields it needs is `items.py`'s business."""

    type: str | None = None
    id: str | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | ListOf[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | ListOf[Part] | None = None
    status: str | None = None


class FunctionTool(_Schema):
    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class TextFormat(_Schema):
    type: str
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextConfig(_Schema):
    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(_Schema):
    effort: str | None = None
    summary: str | None = None
    """No summaries are made."""


class ResponseStreamOptions(_Schema):
    include_obfuscation: bool | None = None
    """Sizes of events are not hidden."""


class InputTokensBody(_Schema):
    """Of a question how long a prompt would be."""

    model: str
    input: str | ListOf[Item] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: ListOf[FunctionTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    truncation: Literal["auto", "disabled"] | None = None


class ResponsesBody(InputTokensBody):
    background: bool | None = None
    """Runs to its end, whether or not its client stays; is asked for by its id."""
    include: ListOf[str] | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    temperature: float | None = None
    top_logprobs: int | None = None
    top_p: float | None = None
    user: str | None = None
