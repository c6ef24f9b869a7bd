"""Which log-probabilities a client wants. Pure.

Raises InvalidRequest, naming the field.
"""

from typing import NamedTuple

from headrace_router.call_limits import MAX_PROMPT_SCORES, MAX_TOP_LOGPROBS
from headrace_router.ranges import check_range
from headrace_router.schemas import ChatBody, CompletionBody, GenerationBody
from headrace_router.token_rules import named_tokens
from headrace_shared.errors import InvalidRequest
from headrace_shared.fleet_messages import ModelCard


class LogprobsWanted(NamedTuple):
    """Numbers of the likeliest tokens that are told beside each token; None: nothing is told."""

    of_output: int | None
    of_echo: int | None
    of_prompt: int | None
    named: tuple[int, ...]
    """Told instead of the likeliest, of the output."""

    @property
    def of_any_prompt(self) -> int | None:
        return max((number for number in (self.of_echo, self.of_prompt) if number is not None), default=None)


def chat_logprobs(body: ChatBody, card: ModelCard) -> LogprobsWanted:
    if body.top_logprobs is not None:
        _check_number("top_logprobs", body.top_logprobs)
        if body.top_logprobs and not body.logprobs:
            raise InvalidRequest("'top_logprobs' needs 'logprobs' to be true.", param="top_logprobs")
    named = named_tokens(body, card, has_logprobs=bool(body.logprobs))
    of_output = (body.top_logprobs or 0) if body.logprobs else None
    return LogprobsWanted(of_output, None, _of_prompt(body), named)


def completion_logprobs(body: CompletionBody, card: ModelCard) -> LogprobsWanted:
    if body.logprobs is not None:
        _check_number("logprobs", body.logprobs)
    named = named_tokens(body, card, has_logprobs=body.logprobs is not None)
    return LogprobsWanted(body.logprobs, body.logprobs if body.echo else None, _of_prompt(body), named)


def check_scores(num_prompt_tokens: int, num_prompt_logprobs: int | None, param: str) -> None:
    if num_prompt_logprobs is not None and num_prompt_tokens * (1 + num_prompt_logprobs) > MAX_PROMPT_SCORES:
        raise InvalidRequest(
            f"Log-probabilities of a prompt of {num_prompt_tokens} tokens with {num_prompt_logprobs} alternatives each "
            f"are more than {MAX_PROMPT_SCORES}.",
            param=param,
        )


def _of_prompt(body: GenerationBody) -> int | None:
    number = body.prompt_logprobs
    if number is None:
        return None
    _check_number("prompt_logprobs", number)
    if body.stream:
        raise InvalidRequest("'prompt_logprobs' cannot be streamed.", param="prompt_logprobs")
    return number


def _check_number(field: str, number: int) -> None:
    if number == -1:
        raise InvalidRequest(
            f"'{field}' of -1 asks for the whole vocabulary; at most {MAX_TOP_LOGPROBS} tokens are told.",
            param=field,
            code="unsupported_value",
        )
    check_range(field, number, 0, MAX_TOP_LOGPROBS)
