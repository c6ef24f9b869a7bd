"""The bodies that clients send. Types only; ranges are `validation.py`'s business.

Unknown fields are kept in `model_extra`. JSON null always means "not given".
"""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

T = TypeVar("T")

ListOf = Annotated[list[T], Field(fail_fast=True)]
"""One wrong element says enough; a long list of them would take long to report."""


class _Schema(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, protected_namespaces=())


class TextPart(_Schema):
    type: str
    text: str | None = None


class ChatMessage(_Schema):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | ListOf[TextPart] | None = None
    name: str | None = None
    tool_calls: ListOf[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class StreamOptions(_Schema):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_queue_events: bool | None = None
    """Events of the type `headrace.queue` tell position and expected wait."""


class JsonSchema(_Schema):
    name: str
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None
    """Answers follow the schema in any case."""


class ResponseFormat(_Schema):
    type: str
    json_schema: JsonSchema | None = None


class StructuredOutputs(_Schema):
    json_: dict[str, Any] | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: ListOf[str] | None = None
    grammar: str | None = None


class GenerationBody(_Schema):
    """What both endpoints take."""

    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stop: str | ListOf[str] | None = None
    seed: int | None = None
    logit_bias: dict[str, float] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None

    # Fields of other open servers.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: ListOf[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    cache_salt: str | None = None
    structured_outputs: StructuredOutputs | None = None
    regex: str | None = None
    ebnf: str | None = None

    overflow: bool | None = None
    """A smaller model may answer where this one's queue is long."""
    background: bool | None = None
    """Runs to its end, whether or not its client stays."""


class Function(_Schema):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """Enforced calls follow the schema in any case; others are the model's own."""


class Tool(_Schema):
    type: str
    function: Function


class ChatBody(GenerationBody):
    messages: ListOf[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: ListOf[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionBody(GenerationBody):
    prompt: str | ListOf[str] | ListOf[int] | ListOf[ListOf[int]]
    logprobs: int | None = None


class TokenizeBody(_Schema):
    model: str
    prompt: str
    add_special_tokens: bool | None = None


class DetokenizeBody(_Schema):
    model: str
    tokens: ListOf[int]
