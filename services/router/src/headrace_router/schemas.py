"""The bodies that clients send. Only types are checked here; ranges are `validation.py`'s business, and written down
here for the API's description.

Unknown fields are kept in `model_extra`. JSON null always means "not given".
"""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from headrace_router import call_limits as limits

T = TypeVar("T")

ListOf = Annotated[list[T], Field(fail_fast=True)]
"""One wrong element says enough; a long list of them would take long to report."""


def _bounded(**bounds: Any) -> Any:
    """A field that need not be given, with its bounds in the words of JSON Schema."""
    return Field(None, json_schema_extra=bounds)


def _one_of(*values: str) -> Any:
    return Field(None, json_schema_extra={"enum": [*values, None]})


_LOGPROBS = {"minimum": 0, "maximum": limits.MAX_TOP_LOGPROBS}
_PENALTY = {"minimum": -limits.MAX_PENALTY, "maximum": limits.MAX_PENALTY}
_NAME = {"maxLength": limits.MAX_NAME_CHARS}


class _Schema(BaseModel):
    model_config = ConfigDict(
        extra="allow", strict=True, allow_inf_nan=False, protected_namespaces=(), use_attribute_docstrings=True
    )


class TextPart(_Schema):
    type: str
    text: str | None = None
    refusal: str | None = None


class ChatMessage(_Schema):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | ListOf[TextPart] | None = None
    name: str | None = None
    tool_calls: ListOf[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    """Of the assistant: text like any other."""
    function_call: dict[str, Any] | None = None
    """Not supported: calls are `tool_calls`."""
    audio: dict[str, Any] | None = None
    """Not supported."""
    reasoning_content: str | None = None
    reasoning: str | None = None


class StreamOptions(_Schema):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None
    """Nothing is padded."""
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
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    """Of a `json_object`, as other open servers take it."""


class StructuredOutputs(_Schema):
    json_: dict[str, Any] | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: ListOf[str] | None = None
    grammar: str | None = None


class PromptCacheOptions(_Schema):
    """Accepted: prompts are cached in any case, for as long as there is room."""

    mode: str | None = None
    ttl: str | int | None = None


class GenerationBody(_Schema):
    """What both endpoints take."""

    model: str
    max_tokens: int | None = _bounded(minimum=0)
    temperature: float | None = _bounded(minimum=0, maximum=limits.MAX_TEMPERATURE)
    top_p: float | None = _bounded(exclusiveMinimum=0, maximum=1)
    n: int | None = _bounded(minimum=1, maximum=limits.MAX_CHOICES)
    stop: str | ListOf[str] | None = _bounded(minLength=1, maxLength=limits.MAX_STOP_CHARS, maxItems=limits.MAX_STOPS)
    seed: int | None = _bounded(minimum=-limits.MAX_SEED - 1, maximum=limits.MAX_SEED)
    logit_bias: dict[str, float] | None = _bounded(maxProperties=limits.MAX_BIASES)
    presence_penalty: float | None = _bounded(**_PENALTY)
    frequency_penalty: float | None = _bounded(**_PENALTY)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    user: str | None = _bounded(**_NAME)
    safety_identifier: str | None = _bounded(**_NAME)
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = _one_of(*limits.SERVICE_TIERS)
    """`flex` waits for as long as others have work to do; the answer tells which was given."""
    prompt_cache_key: str | None = _bounded(**_NAME)
    """Requests with the same key meet the same cache."""
    prompt_cache_options: PromptCacheOptions | None = None
    prompt_cache_retention: str | None = _bounded(**_NAME)

    # Fields of other open servers.
    top_k: int | None = _bounded(minimum=-1, maximum=limits.MAX_SEED)
    min_p: float | None = _bounded(minimum=0, maximum=1)
    repetition_penalty: float | None = _bounded(exclusiveMinimum=0, maximum=limits.MAX_REPETITION_PENALTY)
    min_tokens: int | None = _bounded(minimum=0)
    ignore_eos: bool | None = None
    stop_token_ids: ListOf[int] | None = _bounded(maxItems=limits.MAX_STOP_TOKENS)
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    cache_salt: str | None = _bounded(minLength=1, maxLength=limits.MAX_SALT_CHARS, pattern=r"^[^@/\\\x00]*$")
    priority: int | None = _bounded(minimum=0, maximum=0)
    """Only 0: classes come with API keys."""
    echo: bool | None = None
    prompt_logprobs: int | None = _bounded(**_LOGPROBS)
    bad_words: ListOf[str] | None = _bounded(maxItems=limits.MAX_BAD_WORDS)
    allowed_token_ids: ListOf[int] | None = _bounded(minItems=1, maxItems=limits.MAX_ALLOWED_TOKENS)
    logprob_token_ids: ListOf[int] | None = _bounded(maxItems=limits.MAX_NAMED_TOKENS)
    return_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    """The token that begins a text, say: by default of a text, but not of a chat, whose template has its own."""
    truncate_prompt_tokens: int | None = _bounded(minimum=-1)
    """Only the last so many tokens of the prompt are used; -1: as many as fit."""
    stream_interval: int | None = _bounded(minimum=1, maximum=limits.MAX_STREAM_INTERVAL)
    """A chunk of a stream has so many tokens; the first and the last one come at once."""
    session_id: str | None = _bounded(**_NAME)
    request_id: str | None = _bounded(**_NAME)
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
    messages: ListOf[ChatMessage] = Field(json_schema_extra={"minItems": 1})
    max_completion_tokens: int | None = _bounded(minimum=1)
    logprobs: bool | None = None
    top_logprobs: int | None = _bounded(**_LOGPROBS)
    tools: ListOf[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = _one_of(*limits.EFFORTS)


class CompletionBody(GenerationBody):
    prompt: str | ListOf[str] | ListOf[int] | ListOf[ListOf[int]] = Field(json_schema_extra={"minItems": 1})
    logprobs: int | None = _bounded(**_LOGPROBS)


class EmbeddingBody(_Schema):
    model: str
    input: str | ListOf[str] | ListOf[int] | ListOf[ListOf[int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: str | None = None
    truncate_prompt_tokens: int | None = _bounded(minimum=-1)
    """Of each input, as of a completion's prompt."""
    add_special_tokens: bool | None = None


_ADAPTER_NAME: dict[str, Any] = {"pattern": "^[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,127}$"}


class LoadAdapterBody(_Schema):
    lora_name: str = Field(json_schema_extra=_ADAPTER_NAME)
    lora_path: str = Field(json_schema_extra={"minLength": 1, "maxLength": limits.MAX_ADAPTER_PATH_CHARS})
    """Folder below the one that the workers allow."""
    base_model: str | None = None
    """Where there are several models."""
    load_inplace: bool | None = None


class UnloadAdapterBody(_Schema):
    lora_name: str = Field(json_schema_extra=_ADAPTER_NAME)


class TokenizeBody(_Schema):
    """Either a prompt or messages."""

    model: str
    prompt: str | None = None
    messages: ListOf[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = _one_of(*limits.EFFORTS)
    tools: ListOf[Tool] | None = None


class DetokenizeBody(_Schema):
    model: str
    tokens: ListOf[int]
