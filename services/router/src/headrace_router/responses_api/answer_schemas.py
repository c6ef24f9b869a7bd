"""Answers of the Responses API, for the API's description."""

from typing import Any, Literal

from msgspec import Struct

from headrace_router.responses_api.response_object import About, Status


class InputTokensDetails(Struct):
    cached_tokens: int


class OutputTokensDetails(Struct):
    reasoning_tokens: int


class ResponseUsage(Struct):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseFailure(Struct):
    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
    message: str


class IncompleteDetails(Struct):
    reason: Literal["max_output_tokens"]


class ResponseObject(About, frozen=True, kw_only=True):
    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Status
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[dict[str, Any]]
    """Messages and function calls."""
    usage: ResponseUsage | None
    temperature: float
    top_p: float
    presence_penalty: float
    frequency_penalty: float


class DeletedResponse(Struct):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItems(Struct):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokens(Struct):
    object: Literal["response.input_tokens"]
    input_tokens: int
