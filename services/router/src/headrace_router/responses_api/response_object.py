"""The response as clients get it, at any time of its life. Pure."""

from typing import Any, Literal

import msgspec
from msgspec import Struct, field

from headrace_router.call_record import AnswerForm
from headrace_router.choices import Usage
from headrace_shared.errors import InvalidRequest, LimitReached, Overloaded, RequestError
from headrace_shared.messages import Request

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
FINAL = frozenset({"completed", "incomplete", "failed", "cancelled"})
PREFIX = "resp_"


class About(Struct, frozen=True, kw_only=True):
    """What the response repeats of its request."""

    background: bool = False
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, str] = {}
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    reasoning: dict[str, str | None] = field(default_factory=lambda: {"effort": None, "summary": None})
    safety_identifier: str | None = None
    service_tier: str = "default"
    store: bool = True
    text: dict[str, Any] = field(default_factory=lambda: {"format": {"type": "text"}, "verbosity": "medium"})
    tool_choice: str | dict[str, Any] = "auto"
    tools: list[dict[str, Any]] = []
    top_logprobs: int = 0
    truncation: str = "disabled"
    user: str | None = None


class Facts(Struct, frozen=True, kw_only=True):
    """What the response says of how it is made."""

    response_id: str
    created: int
    """Seconds since the epoch."""
    model: str
    temperature: float
    top_p: float
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0


def response_object(
    about: About,
    facts: Facts,
    status: Status,
    output: list[dict[str, Any]],
    *,
    usage: Usage | None = None,
    error: dict[str, Any] | None = None,
    incomplete_reason: str | None = None,
    completed_at: int | None = None,
) -> dict[str, Any]:
    return {
        "id": facts.response_id,
        "object": "response",
        "created_at": facts.created,
        "completed_at": completed_at,
        "status": status,
        "error": error,
        "incomplete_details": None if incomplete_reason is None else {"reason": incomplete_reason},
        "model": facts.model,
        "output": output,
        "usage": None if usage is None else _usage(usage),
        "temperature": facts.temperature,
        "top_p": facts.top_p,
        "presence_penalty": facts.presence_penalty,
        "frequency_penalty": facts.frequency_penalty,
        **msgspec.to_builtins(about),
    }


def about_of(form: AnswerForm) -> About:
    return msgspec.json.decode(form.about, type=About)


def facts_of(request: Request, created: int) -> Facts:
    """`request`: what the call has queued."""
    sampling = request.sampling
    return Facts(
        response_id=PREFIX + request.request_id,
        created=created,
        model=request.adapter or request.model,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
    )


def error_of(error: RequestError) -> dict[str, Any]:
    """Clients know few codes."""
    code = "server_error"
    if isinstance(error, LimitReached | Overloaded):
        code = "rate_limit_exceeded"
    elif isinstance(error, InvalidRequest):
        code = "invalid_prompt"
    return {"code": code, "message": error.message}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
