"""How a call's answer is written, and all that another router needs to go on with it. Pure.

Kept in the bucket CALLS for calls that may be continued; the tokens themselves are in the token log.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

import msgspec
from msgspec import Struct

from headrace_router.choices import ChoiceText
from headrace_router.embedding_form import EmbeddingChoice
from headrace_router.models import ServedModel
from headrace_router.prompt import Prompt
from headrace_router.tools import CallFormat, ToolUse
from headrace_router.validation import ValidParams
from headrace_shared.messages import Request, RequestId, StopParams


class Dialect(StrEnum):
    """The API in whose words an answer is written."""

    OPENAI = "openai"
    """Chat completions and completions."""
    RESPONSES = "responses"
    MESSAGES = "messages"
    EMBEDDINGS = "embeddings"


class AnswerForm(Struct, frozen=True, kw_only=True):
    """What the client gets to see."""

    is_chat: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    skip_special_tokens: bool
    stop_strings: tuple[str, ...]
    include_stop: bool
    tools: ToolUse | None = None
    echoes: tuple[str, ...] = ()
    """What the answers to each prompt begin with."""
    echo_logprobs: int | None = None
    prompt_logprobs: int | None = None
    returns_ids: bool = False
    is_empty: bool = False
    """Nothing is generated."""
    stream_interval: int = 1
    service_tier: str = ""
    """Told to the client if it is not empty."""
    dialect: Dialect = Dialect.OPENAI
    about: bytes = b""
    """What only the dialect's writer understands, as JSON."""
    by_token: bool = False
    """No event is made of more than one token: events are numbered alike wherever they are written."""
    form_param: str = ""
    """The field that asks for a form of the answer, where there is one."""

    @property
    def shows_prompts(self) -> bool:
        """The prompts' tokens are part of the answer."""
        return self.echo_logprobs is not None or self.prompt_logprobs is not None or self.returns_ids


class CallRecord(Struct, frozen=True, tag=True, kw_only=True):
    owner: str
    """Of whoever made the call; nobody else gets it."""
    created: int
    """Seconds since the epoch, as told to the client."""
    form: AnswerForm
    requests: tuple[Request, ...]
    """One for each prompt, without the prompt's tokens unless the answer shows them."""
    num_prompt_tokens: tuple[int, ...]
    stream_sequences: tuple[int, ...]
    """Of the queue messages."""

    @property
    def request_id(self) -> RequestId:
        """The first request's is that of the call."""
        return self.requests[0].request_id


class Wording(NamedTuple):
    """How an endpoint's answers are written, as far as their parameters do not say."""

    dialect: Dialect = Dialect.OPENAI
    about: bytes = b""
    by_token: bool = False


def form_of(params: ValidParams, wording: Wording, *, is_chat: bool) -> AnswerForm:
    # Where calls begin only special tokens tell.
    shows_special = params.tools is not None and params.tools.format is CallFormat.NAMED
    return AnswerForm(
        is_chat=is_chat,
        stream=params.stream,
        include_usage=params.include_usage,
        continuous_usage=params.continuous_usage,
        skip_special_tokens=params.skip_special_tokens and not shows_special,
        stop_strings=params.stop_strings,
        include_stop=params.include_stop,
        tools=params.tools,
        echo_logprobs=params.echo_logprobs,
        prompt_logprobs=params.prompt_logprobs,
        returns_ids=params.returns_ids,
        is_empty=params.max_tokens == 0,
        stream_interval=params.stream_interval,
        form_param="" if params.form is None else params.form.param,
        **wording._asdict(),
    )


def record_of(owner: str, created: int, form: AnswerForm, prompts: Sequence[Prompt]) -> CallRecord:
    """Of a call whose requests are queued."""
    return CallRecord(
        owner=owner,
        created=created,
        form=form,
        requests=tuple(
            prompt.request if form.shows_prompts else msgspec.structs.replace(prompt.request, prompt=b"")
            for prompt in prompts
        ),
        num_prompt_tokens=tuple(prompt.num_tokens for prompt in prompts),
        stream_sequences=tuple(prompt.stream_sequence or 0 for prompt in prompts),
    )


def prompts_of(record: CallRecord, model: ServedModel) -> list[Prompt]:
    """At the beginning of their answers."""
    prompts = []
    for request, num_tokens, sequence in zip(
        record.requests, record.num_prompt_tokens, record.stream_sequences, strict=True
    ):
        choices = [new_choice(record.form, request.stop, model) for _ in range(request.num_choices)]
        prompt = Prompt(request, choices, num_tokens)
        prompt.stream_sequence = sequence or None
        prompts.append(prompt)
    return prompts


def new_choice(form: AnswerForm, stop: StopParams, model: ServedModel) -> ChoiceText:
    if form.dialect is Dialect.EMBEDDINGS:
        return EmbeddingChoice(model.encoder.vocabulary)
    return ChoiceText(
        model.encoder.vocabulary,
        skip_special=form.skip_special_tokens,
        stops=form.stop_strings,
        include_stop=form.include_stop,
        min_tokens=stop.min_tokens,
        eos_token_ids=model.card.eos_token_ids,
        keeps_ids=form.returns_ids,
        is_empty=form.is_empty,
        # Who scores a prompt leaves out the last entry, which is to be that of the one token behind it.
        scores_end=form.echo_logprobs is not None,
    )
