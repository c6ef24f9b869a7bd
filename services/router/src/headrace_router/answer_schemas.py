"""Answers as clients get them, for the API's description. What writes generated text is `responses.py`."""

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from headrace_router.logprob_objects import ChatLogprobs, CompletionLogprobs, PromptLogprobs
from headrace_router.responses import ChatMessageObject, UsageObject


class ErrorObject(Struct):
    message: str
    type: str
    param: str | None
    """The field that is at fault."""
    code: str | None
    """Stable, for programs."""
    request_id: str | UnsetType = UNSET


class ErrorBody(Struct):
    error: ErrorObject


class ChatChoice(Struct):
    index: int
    message: ChatMessageObject
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    stop_reason: str | int | None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Struct):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageObject
    service_tier: str | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class TextChoice(Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: str | int | None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class TextCompletion(Struct):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: UsageObject
    service_tier: str | UnsetType = UNSET


class ModelObject(Struct):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int | UnsetType = UNSET
    default_parameters: dict[str, float] | UnsetType = UNSET
    """Sampling for calls that do not say otherwise, as far as it is not OpenAI's."""
    permission: list[dict[str, Any]] | UnsetType = UNSET


class ModelList(Struct):
    object: Literal["list"]
    data: list[ModelObject]


class Tokenized(Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET


class Detokenized(Struct):
    prompt: str


class Rendered(Struct):
    model: str
    prompt: str
    """As text, special tokens included."""
    token_ids: list[int]
    sampling_params: dict[str, Any]


class RequestStatus(Struct):
    """What has become of a call so far. More fields tell its place in the queue, while it waits."""

    id: str
    object: Literal["request"]
    created: int
    model: str
    status: str
    completion_tokens: int


class Cancelling(Struct):
    id: str
    object: Literal["request"]
    status: Literal["cancelling", "completed", "cancelled", "expired", "shed", "failed"]


class Health(Struct):
    status: Literal["ready", "not_ready"]
    workers: int
    reason: str | UnsetType = UNSET


class Alive(Struct):
    status: Literal["alive"]


class ServerLoad(Struct):
    server_load: int


class Version(Struct):
    version: str
