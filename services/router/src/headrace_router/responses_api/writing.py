"""Makes the writer of a response."""

import time
from collections.abc import Callable, Sequence

import msgspec

from headrace_router.call_record import AnswerForm
from headrace_router.choices import TokenText
from headrace_router.logprob_objects import LogprobWriter, TokenObject
from headrace_router.models import ServedModel
from headrace_router.responses_api.output import TokenFormat
from headrace_router.responses_api.response_object import about_of, facts_of
from headrace_router.responses_api.writer import ResponseWriter
from headrace_shared.messages import Request, SamplingParams


def response_writer(
    request: Request,
    form: AnswerForm,
    created: int,
    model: ServedModel,
    starting_after: int = -1,
    clock: Callable[[], float] = time.time,
) -> ResponseWriter:
    num_logprobs = num_told(request.sampling)
    token_format: TokenFormat | None = None
    if num_logprobs is not None:
        logprobs = LogprobWriter(model.encoder.vocabulary, num_logprobs)

        def token_format(tokens: Sequence[TokenText]) -> list[TokenObject]:
            return logprobs.of_chat(tokens).content

    facts = facts_of(request, created)
    about = about_of(form)
    if form.service_tier:
        about = msgspec.structs.replace(about, service_tier=form.service_tier)
    return ResponseWriter(about, facts, form.tools, token_format, clock, starting_after)


def num_told(sampling: SamplingParams) -> int | None:
    """Tokens whose log-probabilities are told beside each one."""
    return len(sampling.logprob_token_ids) or sampling.num_logprobs
